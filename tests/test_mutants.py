"""The table of planted mistakes fits the code: ci/mutants.py, which takes minutes, can be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import mutants, scratch

ROOT = Path(__file__).resolve().parent.parent
TABLE = mutants.read_mutants()


def test_there_are_enough_of_them_in_both_languages() -> None:
    names = [(mutant.language, mutant.name) for mutant in TABLE]
    assert len(names) == len(set(names)) >= 30
    assert {language for language, _ in names} == {"C++", "numpy"}


@pytest.mark.parametrize("mutant", TABLE, ids=lambda m: f"{m.file}: {m.name}")
def test_the_text_to_replace_occurs_once(mutant: mutants.Mutant) -> None:
    text = (ROOT / "extensor" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, "the code has changed: change ci/mutants.toml with it"
    assert mutant.old != mutant.new


def test_a_mutant_is_caught_or_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself, on one numpy mutant and tests that do and do not see it."""
    mutant = next(m for m in TABLE if m.name == "negative zero loses its sign")
    monkeypatch.setattr(mutants, "NUMPY_TESTS", ("tests/unit/quant/test_quantize_by_hand.py",))
    caught = mutants.judge(mutant, tmp_path)
    monkeypatch.setattr(mutants, "NUMPY_TESTS", ("tests/unit/quant/test_hadamard.py",))
    survived = mutants.judge(mutant, tmp_path)
    gone = mutants.judge(mutants.Mutant("gone", mutant.file, "no such text", ""), tmp_path)
    assert [o.outcome for o in (caught, survived, gone)] == ["caught", "survived", "broken"], caught
    assert "found 0" in gone.by


def test_a_copy_is_brought_up_to_date(tmp_path: Path) -> None:
    scratch.bring_up_to_date(tmp_path)
    name = "extensor/random.py"
    original = (ROOT / name).read_text(encoding="utf-8")
    scratch.replace(tmp_path, name, "self.slot << 1", "self.slot << 2")
    assert (tmp_path / name).read_text(encoding="utf-8") != original
    (tmp_path / "extensor" / "left_over.py").write_text("")
    untouched = (tmp_path / "extensor" / "config.py").stat().st_mtime_ns
    scratch.bring_up_to_date(tmp_path)
    assert (tmp_path / name).read_text(encoding="utf-8") == original
    assert not (tmp_path / "extensor" / "left_over.py").exists()
    assert (tmp_path / "extensor" / "config.py").stat().st_mtime_ns == untouched
