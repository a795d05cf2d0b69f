"""`ci/cubins.py`: what is compiled again, and what comes from the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ci import cubins
from extensor_cuda.runtime.compile import Source

TEXT = "#if FAST // the quick one\nint fast;\n#else\nint slow;\n#endif\n"


def source(text: str = TEXT, name: str = "k", exact: bool = True, **macros: object) -> Source:
    return Source(name, text, tuple((key, str(value)) for key, value in macros.items()), exact)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ preprocessor")
def test_only_what_changed_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Source, str]] = []

    def compile_cubin(source: Source, arch: str) -> tuple[bytes, str]:
        made.append((source, arch))
        if "broken" in source.text:
            raise RuntimeError("does not compile")
        return b"\0code" + bytes([len(made)]), f"log {len(made)}\n\0"  # NVRTC ends its log so

    monkeypatch.setattr(cubins, "version", lambda: "13.4")
    compiled = cubins.cached(compile_cubin, tmp_path / "folder")
    first = compiled(source(FAST=1), "sm_90a")
    assert first == (b"\0code\1", "log 1\n\0")
    for same in (source(FAST=2), source(TEXT.replace("quick", "other"), FAST=1)):
        assert compiled(same, "sm_90a") == first
    others = source(FAST=0), source(FAST=1, exact=False), source(TEXT + "int more;", FAST=1)
    assert len({compiled(other, "sm_90a") for other in others} | {first}) == 4
    assert compiled(source(FAST=1), "sm_80") != first
    for_ada = [
        compiled(source(f"#if __CUDA_ARCH__ < 900\nint a = {n};\n#endif"), "sm_89") for n in (1, 2)
    ]
    assert for_ada[0] != for_ada[1]
    monkeypatch.setattr(cubins, "version", lambda: "13.5")
    newer = compiled(source(FAST=1), "sm_90a")
    assert newer != first
    count = len(made)
    for _ in range(2):  # an error is not kept
        with pytest.raises(RuntimeError, match="does not compile"):
            compiled(source("int broken;"), "sm_90a")
    assert len(made) == count + 2
    assert cubins.cached(compile_cubin, tmp_path / "folder")(source(FAST=1), "sm_90a") == newer
    assert len(made) == count + 2
