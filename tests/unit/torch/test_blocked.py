"""Torch tensors as codes and scales: extensor's bytes, no copy on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")


@pytest.mark.parametrize("name", [name for name in et.FORMATS if name != "outlier"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_extensors(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, 96).to(getattr(torch, dtype))
    q = ext.to_blocked(x, name)
    own = et.ExTensor.from_dlpack(x).quantize(name)
    for part, array in own.data.parts.items():
        np.testing.assert_array_equal(q.parts[part].numpy(), array, part)
    assert q.nbytes == own.nbytes and q.shape == (5, 7, 96)
    np.testing.assert_array_equal(q.dequantize().numpy(), own.dequantize().numpy())
    narrow = q.dequantize(torch.bfloat16)
    assert torch.equal(narrow, q.dequantize().bfloat16())


def test_fields_of_the_spec_reach_it() -> None:
    x = torch.randn(64, 32)
    q = ext.to_blocked(x, "mxfp4", axis=0, scale_rule="rceil", rounding="stochastic", seed=3)
    own = et.ExTensor.from_dlpack(x).quantize(q.spec, seed=3)
    np.testing.assert_array_equal(q.codes.numpy(), own.codes)
    assert q.spec.axis == 0 and q.codes.shape == (32, 32)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantizer reads torch's memory, and the result stays where the quantizer wrote it."""
    from extensor.backends import registry

    seen: list[Any] = []
    backend = type(registry.get("cpu"))
    real = backend.quantize

    def quantize(self: Any, x: Any, *rest: Any) -> Any:
        made = real(self, x, *rest)
        seen.append((x.ctypes.data, made[0].codes.ctypes.data))
        return made

    monkeypatch.setattr(backend, "quantize", quantize)
    for x in (torch.randn(64, 64), torch.randn(64, 64).bfloat16()):
        q = ext.to_blocked(x, "nvfp4")
        assert seen.pop() == (x.data_ptr(), q.codes.data_ptr())
        assert q.to_extensor().codes.ctypes.data == q.codes.data_ptr()


def test_what_cannot_be_blocked_says_so() -> None:
    x = torch.randn(4, 32)
    for value, spec, options, error, match in (
        (x.numpy(), "mxfp4", {}, TypeError, "expected a torch.Tensor, got ndarray"),
        (x.double(), "mxfp4", {}, TypeError, "got torch.float64; convert it with x.float"),
        (x.to("meta"), "mxfp4", {}, TypeError, "meta tensor has no values"),
        (x.to_sparse(), "mxfp4", {}, TypeError, "expected a dense tensor"),
        (x, "mxpf4", {}, ValueError, "mxfp4"),
        (x, "mxfp4", {"rounding": "stochastic"}, ValueError, "needs seed"),
        (x, et.QuantSpec("mxfp4"), {"axis": 0}, TypeError, "axis: say it in the QuantSpec"),
    ):
        with pytest.raises(error, match=match):
            ext.to_blocked(value, spec, **options)
    with pytest.raises(TypeError, match=r"dequantize: expected float32.*got torch.float64"):
        ext.to_blocked(x, "mxfp4").dequantize(torch.float64)
