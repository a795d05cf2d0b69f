"""A struct in a kernel's text as a ctypes structure."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from extensor_cuda.runtime.c_struct import structure
from tests.unit.cuda.fields import check_fields

TEXT = """
struct Given {
    const u8 *codes, *scales;  // two of one type
    int rows, columns;
    void* out[2];
    const signed char* zeros;
    float eps; /* and a
    comment of lines */
    i64 pitch;
    u32 words[3];
};
"""


def test_the_fields_lie_as_the_compiler_puts_them(tmp_path: Path, compiler: str) -> None:
    made = structure(TEXT, "Given")
    names = ["codes", "scales", "rows", "columns", "out", "zeros", "eps", "pitch", "words"]
    assert [field[0] for field in made._fields_] == names
    assert issubclass(made, ctypes.Structure)
    check_fields(TEXT, "Given", made, compiler, tmp_path)


@pytest.mark.parametrize(
    "text", ["", "struct Given {\n    Other what;\n};", "struct Given {\n    3 x;\n};"]
)
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="struct Given"):
        structure(text, "Given")
