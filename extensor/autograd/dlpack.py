"""bfloat16 through DLPack, which numpy's capsules cannot name.

A 16-bit capsule from the array module is relabelled in place: its dtype field is
all that differs between uint16 and bfloat16, so memory, shape and lifetime stay
the exporter's. Layouts: DLPack 1.0, `dlpack.h` (DLManagedTensor and
DLManagedTensorVersioned); the dtype is {uint8 code, uint8 bits, uint16 lanes}.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["export", "from_exporter"]

_UINT, _BFLOAT = 1, 4  # DLDataTypeCode
_KNOWN = {
    *((code, bits) for code in (0, _UINT) for bits in (8, 16, 32, 64)),
    *((2, bits) for bits in (16, 32, 64)),
    *((_BFLOAT, 16), (5, 64), (5, 128), (6, 8)),
}
"""(code, bits) of the dense dtypes: integers, floats, bfloat16, complex numbers, bool."""
# Bytes from the start of the managed tensor to its dtype: data 8, device 8, ndim 4; before it, in
# the versioned form, version 8, context 8, deleter 8 and flags 8.
_DTYPE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}

_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _dtype_of(capsule: Any) -> Any:
    """The capsule's (code, bits), as two bytes that can be written."""
    name = _api.PyCapsule_GetName(capsule)
    if name not in _DTYPE_AT:
        raise BufferError(f"DLPack: expected an unused capsule, got one named {name!r}")
    start = _api.PyCapsule_GetPointer(capsule, name)
    return (ctypes.c_uint8 * 2).from_address(start + _DTYPE_AT[name])


class _Relabelled:
    """A DLPack exporter whose bfloat16 capsules say uint16, for an array module to read."""

    def __init__(self, other: Any) -> None:
        self.other = other
        self.was_bfloat16 = False

    def __dlpack__(self, **options: Any) -> Any:
        try:
            capsule = self.other.__dlpack__(**options)
        except TypeError:  # an exporter from before DLPack 1.0 takes a stream alone
            capsule = self.other.__dlpack__()
        dtype = _dtype_of(capsule)
        if tuple(dtype) not in _KNOWN:
            raise TypeError(
                "from_dlpack: expected bool, integers, floats of 16 bits or more, or complex64 or "
                f"complex128, got DLPack's dtype code {dtype[0]} of {dtype[1]} bits; convert it "
                "first, or hand over its bytes as uint8"
            )
        if tuple(dtype) == (_BFLOAT, 16):
            dtype[0] = _UINT
            self.was_bfloat16 = True
        return capsule

    def __dlpack_device__(self) -> Any:
        return self.other.__dlpack_device__()


def export(array: Any, **options: Any) -> Any:
    """A DLPack capsule of a raw array; ``options`` are those of ``__dlpack__``.

    An array that runs backwards through its memory is copied: torch ends the process at a negative
    stride.

    Raises:
        BufferError: if it would have to be copied, and ``copy`` is False.
    """
    if any(stride < 0 for stride in array.strides):
        if options.get("copy") is False:
            raise BufferError(
                "DLPack: this tensor runs backwards through its memory (a negative stride), which "
                "not every library can read; allow a copy, or export x.clone()"
            )
        array = array.copy()
    if array.dtype != ml_dtypes.bfloat16:
        return array.__dlpack__(**options)
    capsule = array.view(np.uint16).__dlpack__(**options)
    _dtype_of(capsule)[0] = _BFLOAT
    return capsule


def from_exporter(other: Any, xp: Any, **options: Any) -> Any:
    """A raw array of the module ``xp`` on the memory of any exporter; see `export`."""
    source = _Relabelled(other)
    array = xp.from_dlpack(source, **options)
    return array.view(ml_dtypes.bfloat16) if source.was_bfloat16 else array
