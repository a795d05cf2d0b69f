"""Calls of every function of the standard's main namespace, but the products (`matrices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.array_api.draw import FC, SIGNED, A, B, C, Call, Calls, Draw, F, N, Named, R, Z, promotes

CALLS = Calls()
call = CALLS.of


def _one(names: str, kinds: Any, **options: Any) -> None:
    call(*names.split())(lambda d: ((d.array(kinds, odd=True, **options),), {}))


def _two(names: str, kinds: Any, odd: bool = True, **options: Any) -> None:
    call(*names.split())(lambda d: (d.pair(kinds, odd=odd, **options), {}))


_one("abs isfinite isinf isnan negative positive round square real conj", N)
_one("sign", R)  # of an infinite complex number the standard leaves it open
_one("acos acosh asin asinh atan atanh cos cosh exp log log10 log1p log2 sin sinh sqrt", FC)
_one("tan tanh", FC)
_one("ceil floor trunc", R)
_one("signbit", F)
_one("imag", C)
_one("logical_not", B)
_one("bitwise_invert", B + Z)
_one("unique_all unique_counts unique_inverse unique_values", A)
_two("add subtract multiply", N)
_two("divide", FC)
_two("remainder", R, odd=False, low=1)
_two("floor_divide", R, odd=False, low=1)
_two("pow", R, odd=False, low=0, high=4)
_two("atan2 copysign hypot logaddexp nextafter", F)
_two("maximum minimum less less_equal greater greater_equal", R)
_two("equal not_equal", A)
_two("logical_and logical_or logical_xor", B)
_two("bitwise_and bitwise_or bitwise_xor", B + Z)
_two("bitwise_left_shift bitwise_right_shift", Z, low=0, high=5)


def _like(d: Draw) -> Call:
    x = d.array(A)
    return (x,), {"dtype": Named(d.one(A))} if d.maybe() else {}


call("zeros_like", "ones_like")(_like)
call("zeros", "ones")(
    lambda d: ((d.shape() if d.maybe() else 3,), {"dtype": Named(d.one(A))} if d.maybe() else {})
)


@call("expm1", "reciprocal")
def _real_special_values(d: Draw) -> Call:
    """array_api_strict has numpy's NaN for 1 / 0 and expm1(inf) where they are complex."""
    kind = d.one(FC)
    return (d.array((kind,), odd=kind in F),), {}


@call("full", "full_like")
def _full(d: Draw) -> Call:
    value = d.one([True, 3, 2.5, 1 - 2j])
    least = {bool: A, int: N, float: FC, complex: C}[type(value)]
    options = {"dtype": Named(d.one(least))} if d.maybe() else {}
    return (d.shape(), np.asarray(value) if options and d.maybe() else value), options


def _full_like(d: Draw) -> Call:
    (shape, value), options = _full(d)
    least = {"b": B, "i": Z, "f": FC, "c": C}[np.asarray(value).dtype.kind]
    return (d.array(least, shape), value), options


CALLS["full_like"] = _full_like


@call("arange")
def _arange(d: Draw) -> Call:
    whole = d.maybe()
    values = [int(v) if whole else float(v) for v in d.rng.integers(-9, 9, 3)]
    step = values[2] or 1
    args = [values[:1], values[:2], [*values[:2], step]][int(d.rng.integers(3))]
    return tuple(args), {"dtype": Named(d.one(SIGNED + F if whole else F))} if d.maybe() else {}


@call("linspace")
def _linspace(d: Draw) -> Call:
    low, high = (float(v) for v in d.rng.normal(size=2))
    options = {"dtype": Named(d.one(F))} if d.maybe() else {}
    return (low, high, int(d.rng.integers(1, 9))), {"endpoint": d.maybe(), **options}


@call("eye")
def _eye(d: Draw) -> Call:
    rows, columns, k = (int(n) for n in d.rng.integers(0, 6, 3))
    options = {"dtype": Named(d.one(A))} if d.maybe() else {}
    return (rows, columns if d.maybe() else None), {"k": k - 3, **options}


call("meshgrid")(
    lambda d: (
        tuple(d.array((k,), d.shape(1, 1)) for k in [d.one(A)] * int(d.rng.integers(1, 4))),
        {"indexing": d.one(["xy", "ij"])},
    )
)
call("tril", "triu")(lambda d: ((d.array(A, d.shape(2, 4)),), {"k": int(d.rng.integers(-3, 4))}))


@call("asarray")
def _asarray(d: Draw) -> Call:
    x = d.array((*B, "int64", "float64", "complex128"), d.shape(0, 2, 1)).tolist()
    return (x,), {}


@call("astype")
def _astype(d: Draw) -> Call:
    x = d.array(A, low=0)
    kinds = C if x.dtype.kind == "c" else A
    return (x, Named(d.one(kinds))), {"copy": d.maybe()}


call("can_cast")(lambda d: ((Named(d.one(A)), Named(d.one(A))), {}))
call("finfo")(lambda d: ((Named(d.one(FC)),), {}))
call("iinfo")(lambda d: ((Named(d.one(Z)),), {}))
KINDS = ["bool", "signed integer", "unsigned integer", "integral", "real floating",
         "complex floating", "numeric"]  # fmt: skip
call("isdtype")(
    lambda d: ((Named(d.one(A)), d.one([*KINDS, ("bool", "integral"), Named("int8")])), {})
)


@call("result_type")
def _result_type(d: Draw) -> Call:
    first = d.one(A)
    second = d.one([k for k in A if promotes(first, k)])
    args = [Named(first), d.array((second,))]
    if d.maybe():
        kind = np.result_type(first, second).kind
        args.append({"b": True, "i": 3, "u": 3, "f": 2.5, "c": d.one([1.5, 2j])}[kind])
    return tuple(args), {}


call("where")(lambda d: _where(d))


def _where(d: Draw) -> Call:
    a, b = d.pair(A, odd=True)
    return (d.array(B, np.broadcast_shapes(np.shape(a), np.shape(b))), a, b), {}


@call("clip")
def _clip(d: Draw) -> Call:
    x = d.array(R, odd=True)
    bounds = [d.array((x.dtype.name,), x.shape[int(d.rng.integers(len(x.shape) + 1)) :], low=a,
                      high=b) for a, b in ((0, 3), (3, 9))]  # fmt: skip
    numbers = [1, 5] if x.dtype.kind in "iu" else [0.5, 5.5]
    return (x,), {
        name: d.one([None, bound, number])
        for name, bound, number in zip(("min", "max"), bounds, numbers, strict=True)
    }


def _reduced(kinds: Any, side: int, **options: Any) -> Callable[[Draw], Call]:
    def drawn(d: Draw) -> Call:
        x = d.array(kinds, d.shape(0, 3, side), **options)
        kwargs: dict[str, Any] = {"axis": d.axes(x.ndim)}
        return (x,), kwargs | ({"keepdims": True} if d.maybe() else {})

    return drawn


call("all", "any")(_reduced(A, 0))
call("count_nonzero")(_reduced(A, 0))
call("max", "min")(_reduced(R, 1, odd=True))
call("mean")(_reduced(FC, 0))


def _accumulated(d: Draw, x: Any) -> Any:
    """An array to add up, and a dtype to do it in: integers may wrap around."""
    if x.dtype.kind in "iu" and d.maybe():
        x = d.array((x.dtype.name,), x.shape, odd=True)
    kinds = [k for k in N if promotes(x.dtype.name, k) and (x.dtype.kind != "c" or k in C)]
    return x, {"dtype": Named(d.one(kinds))} if d.maybe() else {}


def _wide(d: Draw) -> Call:
    (x,), kwargs = _reduced(N, 0, low=-3, high=3)(d)
    x, dtype = _accumulated(d, x)
    return (x,), kwargs | dtype


call("sum", "prod")(_wide)


@call("std", "var")
def _spread(d: Draw) -> Call:
    args, kwargs = _reduced(F, 0)(d)
    return args, kwargs | ({"correction": d.one([0, 1, 0.5])} if d.maybe() else {})


@call("cumulative_sum", "cumulative_prod")
def _running(d: Draw) -> Call:
    x = d.array(N, d.shape(1, 3), low=-2, high=3)
    kwargs: dict[str, Any] = {} if x.ndim == 1 and d.maybe() else {"axis": d.axis(x.ndim, False)}
    x, dtype = _accumulated(d, x)
    return (x,), kwargs | dtype | ({"include_initial": True} if d.maybe() else {})


@call("argmax", "argmin")
def _place(d: Draw) -> Call:
    x = d.array(R, d.shape(0, 3, 1))
    return (x,), {"axis": d.axis(x.ndim), "keepdims": d.maybe()}


@call("sort", "argsort")
def _sort(d: Draw) -> Call:
    x = d.array(R, d.shape(1, 3))
    return (x,), {"axis": d.axis(x.ndim, False), "descending": d.maybe()}


call("nonzero")(lambda d: ((d.array(A, d.shape(1, 3)),), {}))
call("isin")(lambda d: (_isin(d), {}))  # array_api_strict 2.6.1 ignores ``invert``


def _isin(d: Draw) -> tuple[Any, Any]:
    kind = d.one(Z)
    return d.array((kind,)), d.one([d.array((kind,)), 3])


@call("searchsorted")
def _search(d: Draw) -> Call:
    kind = d.one(R)
    row, values = d.array((kind,), (int(d.rng.integers(1, 6)),)), d.array((kind,))
    if d.maybe():
        return (row, values), {"sorter": np.argsort(row), "side": d.one(["left", "right"])}
    return (np.sort(row), values), {"side": d.one(["left", "right"])}


@call("take")
def _take(d: Draw) -> Call:
    x = d.array(A, d.shape(1, 3, 1))
    axis = d.axis(x.ndim, False)
    places = d.rng.integers(-x.shape[axis], x.shape[axis], int(d.rng.integers(0, 5)))
    return (x, places), {"axis": axis} if x.ndim > 1 or d.maybe() else {}


@call("take_along_axis")
def _along(d: Draw) -> Call:
    x = d.array(A, d.shape(1, 3, 1))
    axis = d.axis(x.ndim, False)
    shape = list(x.shape)
    shape[axis] = int(d.rng.integers(0, 4))
    return (x, d.rng.integers(-x.shape[axis], x.shape[axis], shape)), {"axis": axis}


@call("broadcast_to")
def _broadcast_to(d: Draw) -> Call:
    shape = d.shape()
    return (d.array(A, tuple(1 if d.maybe() else n for n in shape)), (2, *shape)), {}


call("broadcast_arrays")(lambda d: (tuple(d.array(A, s) for s in _fitting(d)), {}))
call("broadcast_shapes")(lambda d: (_fitting(d), {}))


def _fitting(d: Draw) -> tuple[tuple[int, ...], ...]:
    shape = d.shape()
    return tuple(
        tuple(1 if d.maybe() else n for n in shape)[int(d.rng.integers(len(shape) + 1)) :]
        for _ in range(3)
    )


@call("concat")
def _concat(d: Draw) -> Call:
    kind = d.one(A)
    kinds = [kind, *(d.one([k for k in A if promotes(kind, k) and k[0] == kind[0]]),) * 2]
    if d.rng.random() < 0.3:
        return ([d.array((k,)) for k in kinds],), {"axis": None}
    shape = list(d.shape(1, 3))
    axis = d.axis(len(shape), False)
    parts = []
    for k in kinds:
        shape[axis] = int(d.rng.integers(0, 4))
        parts.append(d.array((k,), tuple(shape)))
    return (parts,), {"axis": axis} if axis or d.maybe() else {}


@call("stack")
def _stack(d: Draw) -> Call:
    kind, shape = d.one(A), d.shape()
    return ([d.array((kind,), shape) for _ in range(3)],), {"axis": d.axis(len(shape) + 1, False)}


@call("expand_dims")
def _expand(d: Draw) -> Call:
    x = d.array(A)
    return (x,), {"axis": int(d.rng.integers(-x.ndim - 1, x.ndim + 1))}


@call("squeeze")
def _squeeze(d: Draw) -> Call:
    x = d.array(A, (1, *d.shape(0, 2, 1), 1))
    return (x, d.one([0, -1, (0, -1)])), {}


def _with_axes(d: Draw) -> Call:
    x = d.array(A)
    return (x,), {"axis": d.axes(x.ndim)}


call("flip")(_with_axes)


@call("roll")
def _roll(d: Draw) -> Call:
    x = d.array(A)
    axis = d.axes(x.ndim)
    shifts = tuple(int(n) for n in d.rng.integers(-6, 7, len(axis) if type(axis) is tuple else 1))
    return (x, shifts if isinstance(axis, tuple) else shifts[0]), {"axis": axis}


@call("moveaxis")
def _moveaxis(d: Draw) -> Call:
    x = d.array(A, d.shape(1, 4))
    count = int(d.rng.integers(1, x.ndim + 1))
    a, b = (tuple(int(i) for i in d.rng.permutation(x.ndim)[:count]) for _ in range(2))
    return (x, a[0], b[0]) if count == 1 and d.maybe() else (x, a, b), {}


@call("permute_dims")
def _permute(d: Draw) -> Call:
    x = d.array(A)
    return (x, tuple(int(i) for i in d.rng.permutation(x.ndim))), {}


@call("repeat")
def _repeat(d: Draw) -> Call:
    x = d.array(A)
    axis = d.axis(x.ndim)
    size = x.size if axis is None else x.shape[axis]
    return (x, d.one([2, 0, d.rng.integers(0, 3, size)])), {"axis": axis}


@call("reshape")
def _reshape(d: Draw) -> Call:
    x = d.array(A)
    expected = tuple(int(n) for n in d.rng.permutation(x.shape)) if x.ndim else (1,)
    expected = (-1,) if x.size and d.maybe() else expected
    return (x, expected), {"copy": d.one([True, None])} if d.maybe() else {}


call("tile")(lambda d: ((d.array(A), d.shape(0, 3, 0, 2)), {}))


@call("unstack")
def _unstack(d: Draw) -> Call:
    x = d.array(A, d.shape(1, 3))
    return (x,), {"axis": d.axis(x.ndim, False)}


@call("diff")
def _diff(d: Draw) -> Call:
    x = d.array(R, d.shape(1, 3, 2))
    axis = d.axis(x.ndim, False)
    kwargs: dict[str, Any] = {"axis": axis, "n": int(d.rng.integers(0, 3))}
    for name in ("prepend", "append"):
        if d.maybe():
            kwargs[name] = d.array((x.dtype.name,), x.shape)
    return (x,), kwargs
