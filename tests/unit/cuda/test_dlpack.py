"""Exchange on the GPU: cupy and torch share the memory, bfloat16 included."""

from __future__ import annotations

from typing import Any

import pytest

import extensor as et


@pytest.mark.parametrize("name", ["bool", "int8", "float16", "float32", "complex64"])
def test_cupy_both_ways_without_a_copy(cuda: Any, name: str) -> None:
    x = et.ones((2, 3), name, device="cuda")
    there = cuda.xp.from_dlpack(x)
    assert there.data.ptr == x.data.data.ptr
    back = et.from_dlpack(there, device="cuda")
    assert back.dtype is x.dtype and back.data.data.ptr == there.data.ptr


def test_bfloat16_to_itself(cuda: Any) -> None:
    x = et.ones((2, 3), "bfloat16", device="cuda")
    back = et.from_dlpack(x, device="cuda")
    assert back.dtype is et.bfloat16 and back.data.data.ptr == x.data.data.ptr


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_torch_both_ways_without_a_copy(cuda: Any, name: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    x = et.ones((2, 3), name, device="cuda")
    there = torch.from_dlpack(x)
    assert str(there.dtype) == f"torch.{name}" and there.data_ptr() == x.data.data.ptr
    assert et.from_dlpack(there, device="cuda").data.data.ptr == x.data.data.ptr
