"""Blocked tensors: what is stored, and what moving, slicing and computing with them means."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et
from extensor.formats import FORMATS
from extensor.quant.reference import RunningAmax

RNG = np.random.default_rng(11)
X = RNG.standard_normal((6, 4, 96)).astype(np.float32)


def _tensor(x: np.ndarray = X) -> et.ExTensor:
    return et.from_numpy(x.copy())


def test_the_line_of_the_readme() -> None:
    q = et.ExTensor.zeros((4, 64)).to_mxfp4(block_size=32)
    assert q.shape == (4, 64)
    assert q.dtype == et.mxfp4
    assert q.codes.shape == (4, 32) and q.codes.dtype == np.uint8
    assert q.scales.shape == (4, 2) and q.scales.dtype == np.uint8
    assert q.nbytes == 4 * 32 + 4 * 2
    assert q.block_size == 32 and q.axis == 1
    assert np.array_equal(q.dequantize().numpy(), np.zeros((4, 64), np.float32))


def test_every_method_gives_its_format() -> None:
    x = _tensor()
    made = {
        "mxfp4": x.to_mxfp4(),
        "mxfp6_e2m3": x.to_mxfp6(),
        "mxfp6_e3m2": x.to_mxfp6(element="e3m2"),
        "mxfp8_e4m3": x.to_mxfp8(),
        "mxfp8_e5m2": x.to_mxfp8(element="e5m2"),
        "mxint8": x.to_mxint8(),
        "nvfp4": x.to_nvfp4(),
        "fp8_e4m3": x.to_fp8(),
        "fp8_e5m2": x.to_fp8(element="e5m2", tile=(1, 32)),
        "int8": x.to_int8(),
        "int4": x.to_int4(group_size=32),
    }
    for name, q in made.items():
        assert q.spec.format == name
        assert q.shape == x.shape
        assert q.nbytes < x.nbytes
        error = np.abs(q.dequantize().numpy() - X).max()
        assert 0 < error < 1.0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axes", [(0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_permute_moves_the_blocks(name: str, axes: tuple[int, int, int]) -> None:
    q = _tensor().quantize(et.QuantSpec(name))
    moved = q.permute(axes)
    assert moved.axis == axes.index(2)
    assert np.array_equal(moved.dequantize().numpy(), q.dequantize().numpy().transpose(axes))
    assert moved.nbytes == q.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_a_clone_has_memory_of_its_own(name: str) -> None:
    q = _tensor().quantize(et.QuantSpec(name))
    copied, kept = q.clone(), q.dequantize().numpy().copy()
    assert copied.dtype is q.dtype and copied.data.spec == q.data.spec
    for part, other in zip(copied.data.parts.values(), q.data.parts.values(), strict=True):
        assert np.array_equal(part, other) and not np.shares_memory(part, other)
        other[...] = 0
    assert np.array_equal(copied.dequantize().numpy(), kept)
    with pytest.raises(TypeError, match="a blocked tensor that is part of a graph has no gradient"):
        et.randn((2, 64), seed=0, requires_grad=True).to_mxfp4().clone()


def test_transposing_square_tiles() -> None:
    q = _tensor(X[0]).to_mxfp4(tile=(2, 16))
    assert np.array_equal(q.T.dequantize().numpy(), q.dequantize().numpy().T)
    q = _tensor().to_mxfp4(tile=(2, 16))
    with pytest.raises(ValueError, match="dequantize"):
        q.permute((1, 0, 2))


KEYS = [
    (slice(1, 3),),
    (2,),
    (slice(None), 1),
    (Ellipsis, slice(32, 96)),
    (slice(0, 6, 2), slice(None), slice(0, 64)),
    (0, slice(1, 3), slice(64, 96)),
]


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("outlier", "outlier_fp4")])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slicing_whole_blocks(name: str, key: tuple[object, ...]) -> None:
    q = _tensor().quantize(et.QuantSpec(name, tile=(1, 32)))
    part = q[key]
    expected = q.dequantize().numpy()[key]
    assert part.shape == expected.shape
    assert np.array_equal(part.dequantize().numpy(), expected)


@pytest.mark.parametrize("length", [48, 80, 33])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxint8"])
def test_slicing_ragged_tails(name: str, length: int) -> None:
    q = _tensor(X[..., :length]).quantize(et.QuantSpec(name, tile=(1, 32)))
    for key in (np.s_[..., 0:32], np.s_[..., 32:], np.s_[1:2]):
        assert np.array_equal(q[key].dequantize().numpy(), q.dequantize().numpy()[key])


@pytest.mark.parametrize("tile", ["tensor", "channel"])
def test_slicing_large_tiles(tile: str) -> None:
    q = _tensor().quantize(et.QuantSpec("fp8_e4m3", tile=tile))
    assert np.array_equal(q[1:4, 2].dequantize().numpy(), q.dequantize().numpy()[1:4, 2])
    with pytest.raises(ValueError, match="cuts blocks"):
        q[..., :32]


@pytest.mark.parametrize(
    "key", [np.s_[..., 1:], np.s_[..., :40], np.s_[..., ::2], np.s_[..., 3], np.s_[..., 10:20]]
)
def test_slices_that_cut_blocks(key: object) -> None:
    with pytest.raises(ValueError, match="dequantize"):
        _tensor().to_mxfp4()[key]


@pytest.mark.parametrize(
    ("tile", "refused"), [(None, [2]), ((2, 32), [1, 2]), ("channel", [2]), ("tensor", [2])]
)
def test_taking_off_the_axes_of_blocks(tile: object, refused: list[int]) -> None:
    q = _tensor().quantize(et.QuantSpec("fp8_e4m3", tile=tile))
    for axis in range(3):
        if axis in refused:
            with pytest.raises(ValueError, match=f"along axis {axis} would cut blocks"):
                et.take(q, et.ExTensor([1, 0]), axis)
        else:
            expected = q.dequantize().numpy().take([1, 0, 1], axis)
            taken = et.take(q, et.ExTensor([1, 0, 1]), axis)
            assert np.array_equal(taken.dequantize().numpy(), expected)


def test_indices_that_are_not_slices() -> None:
    q = _tensor().to_mxfp4()
    for place in (0, -len(q)):
        assert np.array_equal(q[place].dequantize().numpy(), q.dequantize().numpy()[0])
    assert np.array_equal(q[..., :32].dequantize().numpy(), q.dequantize().numpy()[..., :32])
    with pytest.raises(TypeError, match="dequantize"):
        q[[0, 1]]
    with pytest.raises(IndexError):
        q[9]
    with pytest.raises(IndexError, match="indices"):
        q[0, 0, :, 0]


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("fp8_e4m3", "fp8_e5m2")])
def test_reshape_keeps_the_block_axis(name: str) -> None:
    q = _tensor().quantize(et.QuantSpec(name))
    assert np.array_equal(
        q.reshape((24, 96)).dequantize().numpy(), q.dequantize().numpy().reshape(24, 96)
    )
    assert q.reshape((3, 8, 96)).axis == 2
    with pytest.raises(ValueError, match="dequantize"):
        q.reshape((6, 384))


@pytest.mark.parametrize("tile", ["tensor", "channel", (1, 32)])
def test_reshape_moves_zero_points(tile: object) -> None:
    q = _tensor().to_int8(tile=tile, symmetric=False)
    assert np.array_equal(
        q.reshape((24, 96)).dequantize().numpy(), q.dequantize().numpy().reshape(24, 96)
    )


def test_reshape_keeps_square_tiles_whole() -> None:
    q = _tensor().to_mxfp4(tile=(2, 16))
    for shape in ((24, 96), (3, 8, 96), (12, 2, 96), (6, 2, 2, 96), (1, 6, 4, 96)):
        moved = q.reshape(shape)
        assert moved.axis == len(shape) - 1
        assert np.array_equal(moved.dequantize().numpy(), q.dequantize().numpy().reshape(shape))
    odd = _tensor(X[:, :3]).to_mxfp4(tile=(2, 16))  # a tile ends within each matrix
    for moving, shape in ((q, (8, 3, 96)), (odd, (18, 96)), (odd, (9, 2, 96))):
        with pytest.raises(ValueError, match="dequantize"):
            moving.reshape(shape)
    assert odd.reshape((2, 3, 3, 96)).shape == (2, 3, 3, 96)


def test_the_block_axis_among_axes_of_one() -> None:
    q = _tensor(X[:1, :1, :1]).to_mxfp4()
    assert q.reshape((1, 1)).axis == 1 and q.reshape((1, 1, 1, 1)).axis == 3


def test_promotion_and_arithmetic() -> None:
    x = _tensor()
    q = x.to_mxfp8()
    for other in (x, q, 2.0):
        result = q + other
        assert result.dtype == et.float32
    assert np.array_equal((q * 2.0).numpy(), q.dequantize().numpy() * 2)


def test_matmul_wants_the_contraction_axis() -> None:
    a, b = _tensor(X[0]), _tensor(X[1])
    product = a.to_mxfp4() @ b.to_mxfp4().T
    left, right = (t.to_mxfp4().dequantize().numpy().astype(np.float64) for t in (a, b))
    # Float32 sums of K terms: |error| <= K eps (|a| @ |b|), whatever their order.
    bound = left.shape[1] * 2.0**-24 * (np.abs(left) @ np.abs(right).T)
    assert np.all(np.abs(product.numpy() - left @ right.T) <= bound)
    assert (a @ b.to_mxfp4().T).dtype == et.float32  # weight-only
    with pytest.raises(ValueError, match="contraction axis"):
        a.to_mxfp4() @ b.to_mxfp4(axis=0).T
    with pytest.raises(ValueError, match="contraction axis"):
        a.to_mxfp4(axis=0) @ b.to_mxfp4().T


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "outlier"])
def test_every_float_can_be_quantized(name: str, dtype: str) -> None:
    x = _tensor().to(dtype)
    expected = x.to("float32").to(name)
    x.requires_grad = True
    q = x.to(name)
    assert np.array_equal(q.codes, expected.codes) and np.array_equal(q.scales, expected.scales)
    assert q.dtype is expected.dtype and q.dequantize().dtype is et.float32
    (q.dequantize() * 3.0).sum().backward()
    assert x.grad.dtype is x.dtype and np.all(x.grad.to("float32").numpy() == 3.0)


def test_in_place_writes_are_refused() -> None:
    q = _tensor().to_mxfp4()
    with pytest.raises((TypeError, ValueError), match=r"blocked|dequantize"):
        q[0] = 1.0


def test_clipped_gradient() -> None:
    x = _tensor(np.array([[1.0, 7.9, -7.9, 6.0]], np.float32))
    x.requires_grad = True
    q = x.quantize(et.QuantSpec("mxfp4", scale_rule="floor"), clip_gradient=True)
    q.dequantize().sum().backward()
    assert x.grad.numpy().tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_running_amax_follows_its_formula() -> None:
    spec = et.QuantSpec("mxfp4", statistic="running", decay=0.5)
    running = RunningAmax()
    large, small = np.full((1, 32), 8.0, np.float32), np.full((1, 32), 0.5, np.float32)
    et.from_numpy(large).quantize(spec, running=running)
    assert running.value.tolist() == [[8.0]]
    q = et.from_numpy(small).quantize(spec, running=running)
    assert running.value.tolist() == [[4.0]]
    assert int(q.scales[0, 0]) == 127  # amax 4 of the decayed maximum, emax 2
    with pytest.raises(ValueError, match="one RunningAmax per tensor"):
        et.from_numpy(X).quantize(spec, running=running)
    assert running.value.tolist() == [[4.0]]
    with pytest.raises(ValueError, match="needs running"):
        et.from_numpy(small).quantize(spec)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_running_amax_survives_a_block_that_is_not_finite(bad: float) -> None:
    """The block is NaN; the maxima of the other blocks go on, its own stays as it was."""
    spec = et.QuantSpec("mxfp4", statistic="running", decay=0.5)
    running = RunningAmax()
    x = np.full((1, 64), 8.0, np.float32)
    broken = x.copy()
    broken[0, 3] = bad
    q = et.from_numpy(broken).quantize(spec, running=running)  # before any finite value, too
    assert running.value.tolist() == [[0.0, 8.0]]
    et.from_numpy(x).quantize(spec, running=running)
    q = et.from_numpy(broken / 64).quantize(spec, running=running)
    assert running.value.tolist() == [[8.0, 4.0]]
    assert q.scales.tolist() == [[255, 127]]
    assert np.isfinite(et.from_numpy(x).quantize(spec, running=running).dequantize().numpy()).all()


def test_running_amax_decays_through_a_block_of_zeros() -> None:
    spec = et.QuantSpec("mxfp4", statistic="running", decay=0.5)
    running = RunningAmax()
    et.full((1, 32), 8.0).quantize(spec, running=running)
    assert et.zeros((1, 32)).quantize(spec, running=running).scales.tolist() == [[0]]
    assert running.value.tolist() == [[4.0]]  # not 0: one empty step forgets nothing


def test_stochastic_needs_a_seed_and_repeats() -> None:
    x = _tensor()
    with pytest.raises(ValueError, match="seed"):
        x.to_mxfp4(rounding="stochastic")
    with pytest.raises(ValueError, match="takes no seed"):
        x.to_mxfp4(seed=1)
    one, two, other = (x.to_mxfp4(rounding="stochastic", seed=s).codes for s in (1, 1, 2))
    assert np.array_equal(one, two) and not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"block_size": 0}, ValueError, "block_size"),
        ({"block_size": -4}, ValueError, "block_size"),
        ({"block_size": 32.0}, TypeError, "block_size"),
        ({"block_size": True}, TypeError, "block_size"),
        ({"block_size": 32, "tile": (1, 32)}, ValueError, "one of them"),
        ({"axis": 3}, ValueError, "axis"),
        ({"axis": -4}, ValueError, "axis"),
        ({"axis": 0.5}, TypeError, "axis"),
        ({"scale_rule": "flor"}, ValueError, "did you mean 'floor'"),
        ({"rounding": "up"}, ValueError, "nearest_even"),
        ({"dialect": "nvidea"}, ValueError, "did you mean 'nvidia'"),
        ({"dialect": "nvidia", "scale_rule": "floor"}, ValueError, "leave one"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], match: str) -> None:
    x = _tensor()
    with pytest.raises(error, match=match):
        x.to_mxfp4(**arguments)
    assert np.array_equal(x.numpy(), X)


def test_bad_tensors() -> None:
    with pytest.raises(TypeError, match="float"):
        et.ones((4, 32), dtype="int32").to_mxfp4()
    with pytest.raises(ValueError, match="scalar"):
        et.full((), 1.0).to_mxfp4()
    with pytest.raises(TypeError, match="already"):
        _tensor().to_mxfp4().to_mxfp4()
    with pytest.raises(TypeError, match="dense"):
        _ = _tensor().codes
    with pytest.raises(ValueError, match="element"):
        _tensor().to_mxfp8(element="e2m1")


def test_empty_tensors() -> None:
    for shape in ((0, 64), (4, 0)):
        q = et.zeros(shape).to_mxfp4()
        assert q.shape == shape
        assert q.dequantize().numpy().shape == shape


def test_astype_goes_into_blocks_and_out_of_them() -> None:
    x = _tensor()
    q = et.astype(x, et.mxfp8_e4m3)
    assert np.array_equal(q.dequantize().numpy(), x.to_mxfp8().dequantize().numpy())
    assert np.array_equal(et.astype(q, et.float32).numpy(), q.dequantize().numpy())
