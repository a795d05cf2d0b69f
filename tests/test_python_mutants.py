"""The table of Python's mutants fits the code, and the judge tells killed ones from survivors."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ci import mutant_judges, python_mutants
from ci.mutant_judges import PACKAGES, Mutant, bound, in_forks, joined, keys_at, killed, statement
from ci.python_mutants import bare, difference, known, marked, unmarked


def test_the_table_fits_the_code() -> None:
    """Most can be planted still; the others leave the table when new ones are drawn."""
    table = known()
    there = [mutant for mutant in table if mutant.source() is not None]
    assert len(there) >= max(30, 0.8 * len(table)), "ci/python_mutants.py --draw makes new ones"
    for mutant in there:
        source = mutant.source()
        assert source is not None
        ast.parse(source)
        assert not (mutant.by and mutant.reason), mutant
    assert {mutant.package for mutant in table} <= PACKAGES.keys()
    rows = Counter((mutant.file, mutant.old, mutant.new) for mutant in table)
    assert max(rows.values()) == 1


def test_a_mutant_is_followed_to_where_its_text_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tests that run its line judge it: a stale line would have others judge."""
    text = Path(mutant_judges.__file__).read_text().splitlines(keepends=True)
    line = text.index("class Mutant:\n") + 1
    row = Mutant("ci/mutant_judges.py", line + 40, text[line - 1], "")
    monkeypatch.setattr(python_mutants, "TABLE", tmp_path / "table.json")
    gone = Mutant("ci/mutant_judges.py", 3, "text that is gone\n", "")
    python_mutants.keep([row, gone, Mutant("ci/no_such_file.py", 3, "import ast\n", "")])
    assert [mutant.line for mutant in known()] == [line]


@pytest.mark.parametrize(("old", "new"), [("a <= b\n", "a < b\n"), ("aa\n", "aaa\n"), ("x\n", "")])
def test_a_row_is_its_mutant(old: str, new: str) -> None:
    mutant = Mutant("extensor/nn/linear.py", 3, old, new, by="a test")
    row = marked(mutant)
    assert unmarked(mutant.file, **row) == mutant and mutant.package == "nn"
    with pytest.raises(ValueError, match="no marks"):
        marked(Mutant(mutant.file, 3, "a « b\n", new))


def test_annotations_samples_and_text_do_not_count() -> None:
    text = 'def f(x: int = 1) -> int:\n    """One."""\n    return x\ny = g(1, samples=2)\n'
    same = 'def f(x: str = 1) -> str:\n    """One."""\n    return x\ny = g(1, samples=3)\n'
    assert bare(text) == bare(same) != bare(text.replace("g(1", "g(2"))


def test_a_mutant_is_the_lines_that_differ() -> None:
    mutant = difference("f.py", "a = 1\nb = 2\nc = 3\n", "a = 1\nb = 4\nc = 3\n")
    assert (mutant.line, mutant.old, mutant.new) == (2, "b = 2\n", "b = 4\n")


def test_a_statement_and_its_names() -> None:
    text = "@d(\n 1)\ndef f(\n a=2\n):\n  if a:\n    return (\n     3\n    )\nA = 4"
    spans = [statement(text, line)[1] for line in (2, 4, 6, 8, 10)]
    assert spans == [range(1, 6), range(1, 6), range(6, 7), range(7, 10), range(10, 11)]
    assert keys_at("A = {\n 'b': f(\n  1),\n 'c': 2}", 3) == {"b"}
    assert keys_at("X = 1\nA = {'b': f(X), 'c': 2}", 1) == {"b"}
    assert bound(statement(text, 2)[0]) == {"f"} and bound(statement(text, 10)[0]) == {"A"}


def test_tests_that_name_what_an_import_makes_judge_it_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or the class that it belongs to; no line of the library need name it."""
    file = "tests/test_python_mutants.py"
    tests = [f"{file}::{name}" for name in (
        "test_a_statement_and_its_names",
        "test_tests_that_name_what_an_import_makes_judge_it_first[zebra]",
        "test_a_statement_and_its_names[slower]",
    )]  # fmt: skip
    found = {"tests": dict(zip(tests, (0.1, 0.5, 0.2), strict=True)), "texts": {},
             "lines": {"models/vgg/configs.py": {"11": [-1], "30": [-1], "33": [0, 1, 2]}},
             }  # fmt: skip
    (tmp_path / "models.json").write_text(json.dumps(found))
    monkeypatch.setattr(mutant_judges, "MAPS", tmp_path)
    judges = mutant_judges.Judges("models", 2.0)
    for line in {"VGG11": 11, "VGGConfig": 30}.values():
        chosen, imported = judges.of(Mutant("models/vgg/configs.py", line, "", ""))
        assert imported and chosen[0][0] == tests[1]
    assert judges.of(Mutant("models/vgg/configs.py", 33, "", ""))[0][0][0] == tests[0]
    assert judges.cases({"zebra"}) == {1} and judges.cases({"slower", "zebr"}) == {1, 2}
    judges.limit = 0.4  # a test that is too slow is left out, and hides no other
    chosen, _ = judges.of(Mutant("models/vgg/configs.py", 33, "", ""))
    assert [test for test, _ in chosen] == [tests[0], tests[2]]


def test_shares_of_a_map_are_joined() -> None:
    first = {"tests": {"a": 1.0}, "lines": {"f.py": {"1": [-1, 0], "2": [0]}}, "texts": {"f.py": 7}}
    second = {"tests": {"b": 2.0}, "lines": {"f.py": {"1": [-1], "2": [0]}, "g.py": {"1": [0]}},
              "texts": {"f.py": 7, "g.py": 8}}  # fmt: skip
    assert joined([first, second]) == {
        "tests": {"a": 1.0, "b": 2.0},
        "lines": {"f.py": {"1": [-1, 0], "2": [0, 1]}, "g.py": {"1": [1]}},
        "texts": {"f.py": 7, "g.py": 8},
    }


def test_a_map_without_its_tests_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pytest that cannot collect ends with 2, and what it wrote is no map."""
    monkeypatch.setattr(mutant_judges, "MAPS", tmp_path)

    def run(command: object, **variables: str) -> CompletedProcess[str]:
        Path(variables["MUTANT_MAP"]).write_text('{"tests": {}, "lines": {}, "texts": {}}')
        return CompletedProcess([], 2, "1 error in collection", "")

    monkeypatch.setattr(mutant_judges, "run", run)
    with pytest.raises(SystemExit, match="no map of nn: pytest ended with 2: 1 error"):
        mutant_judges.map_lines(["nn"], jobs=2)


def test_the_judge() -> None:
    """On a mutant that a test of dropout notices, and one of norms does not."""
    file, old = "extensor/nn/dropout.py", "            return x\n"
    mutant = Mutant(file, 70, old, "            return x * 2\n")
    at_import = Mutant(file, 1, "class Dropout(Module):\n", "class Dropout(Module, object):\n")
    kernel = "        self.conv2 = nn.Conv2d(one, two, 5, rng=rng)\n"
    late = Mutant("models/lenet/model.py", 37, kernel, kernel.replace("5", "3"))
    tests = "tests/unit/nn/test_layers.py::test_"
    noticed = f"{tests}dropout_does_nothing_in_evaluation_or_for_zero"
    other = f"{tests}batch_norm_in_evaluation_uses_the_running_statistics"
    assert killed(mutant, [other, noticed]).split(" ")[0] == noticed
    sizes = "tests/unit/models/test_vision.py::test_lenet5_has_its_61706_weights"
    timed = [(other, 0.1), (noticed, 0.1)]
    cases = [(mutant, timed), (mutant, timed[:1]), (at_import, timed), (late, [(sizes, 1)])]
    assert in_forks(*zip(*cases, strict=True)) == [noticed, "", None, sizes]
    assert Mutant(file, 70, "no such line\n", "").source() is None
