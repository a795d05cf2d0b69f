"""Calls of products, `linalg` and `fft`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.array_api.draw import FC, A, C, Call, Calls, Draw, F, N, Named, promotes

CALLS = Calls()
call = CALLS.of

# --- products, in both namespaces --------------------------------------------------------------


def _products(d: Draw) -> tuple[str, str]:
    first = d.one(N)
    return first, d.one([k for k in N if promotes(first, k)])


@call("matmul", "linalg.matmul")
def _matmul(d: Draw) -> Call:
    a, b = _products(d)
    m, k, n = (int(v) for v in d.rng.integers(0, 5, 3))
    if d.maybe():
        lead = d.shape(0, 2)
        return (d.array((a,), (*lead, m, k)), d.array((b,), (*lead, k, n))), {}
    left, right = ((k,) if d.maybe() else (m, k)), ((k,) if d.maybe() else (k, n))
    return (d.array((a,), left), d.array((b,), right)), {}


call("matrix_transpose", "linalg.matrix_transpose")(lambda d: ((d.array(A, d.shape(2, 4)),), {}))


@call("tensordot", "linalg.tensordot")
def _tensordot(d: Draw) -> Call:
    a, b = _products(d)
    middle = d.shape(0, 2)
    left, right = d.array((a,), (*d.shape(0, 2), *middle)), d.array((b,), (*middle, *d.shape(0, 2)))
    count = len(middle)
    pairs = tuple(range(left.ndim - count, left.ndim)), tuple(range(count))
    return (left, right), {"axes": count if d.maybe() else pairs}


@call("vecdot", "linalg.vecdot")
def _vecdot(d: Draw) -> Call:
    a, b = _products(d)
    shape = d.shape(1, 3)
    return (d.array((a,), shape), d.array((b,), shape[int(d.rng.integers(len(shape))) :])), {}


# --- linalg --------------------------------------------------------------------------------------

for _name in ("eigh", "eigvalsh"):
    call(f"linalg.{_name}")(lambda d: ((d.hermitian(),), {}))
for _name in ("det", "inv", "slogdet", "eig", "eigvals"):
    call(f"linalg.{_name}")(lambda d: ((d.good(),), {}))
call("linalg.cholesky")(lambda d: ((d.hermitian(),), {"upper": d.maybe()}))
call("linalg.matrix_power")(lambda d: ((d.good(), int(d.rng.integers(-2, 4))), {}))
call("linalg.svdvals")(lambda d: ((d.matrices(square=False),), {}))
call("linalg.svd")(lambda d: ((d.matrices(square=False),), {"full_matrices": d.maybe()}))
call("linalg.qr")(lambda d: ((d.matrices(square=False),), {"mode": d.one(["reduced", "complete"])}))
call("linalg.pinv", "linalg.matrix_rank")(
    lambda d: ((d.matrices(square=False, side=1),), {"rtol": 1e-3} if d.maybe() else {})
)
call("linalg.diagonal")(
    lambda d: ((d.array(A, d.shape(2, 4)),), {"offset": int(d.rng.integers(-2, 3))})
)
call("linalg.trace")(
    lambda d: ((d.array(N, d.shape(2, 4)),), {"offset": int(d.rng.integers(-2, 3))})
)


@call("linalg.cross")
def _cross(d: Draw) -> Call:
    a, b = _products(d)
    shape = (*d.shape(0, 2), 3)
    return (d.array((a,), shape), d.array((b,), shape[int(d.rng.integers(len(shape))) :])), {}


@call("linalg.outer")
def _outer(d: Draw) -> Call:
    a, b = _products(d)
    return (d.array((a,), d.shape(1, 1)), d.array((b,), d.shape(1, 1))), {}


@call("linalg.solve")
def _solve(d: Draw) -> Call:
    x = d.good()
    n = x.shape[-1]
    if d.maybe():
        return (x, d.array((x.dtype.name,), (n,))), {}
    return (x, d.array((x.dtype.name,), (*x.shape[:-2], n, 3))), {}


@call("linalg.matrix_norm")
def _matrix_norm(d: Draw) -> Call:
    ords = ["fro", "nuc", np.inf, -np.inf, 1, -1, 2, -2]
    x = d.matrices(square=False, side=1)
    return (x,), {"ord": d.one(ords), "keepdims": d.maybe()}


@call("linalg.vector_norm")
def _vector_norm(d: Draw) -> Call:
    x = d.array(FC, d.shape(1, 3, 1))
    return (x,), {
        "axis": d.axes(x.ndim), "keepdims": d.maybe(),
        "ord": d.one([2, 1, 0, 3.5, np.inf, -np.inf, -1, -2]),
    }  # fmt: skip


# --- fft -----------------------------------------------------------------------------------------

NORMS = ["backward", "ortho", "forward"]


def _line(kinds: Any) -> Callable[[Draw], Call]:
    def drawn(d: Draw) -> Call:
        x = d.array(kinds, d.shape(1, 3, 2))
        n = {"n": int(d.rng.integers(2, 7))} if d.maybe() else {}
        return (x,), {"axis": d.axis(x.ndim, False), "norm": d.one(NORMS), **n}

    return drawn


def _grid(kinds: Any) -> Callable[[Draw], Call]:
    def drawn(d: Draw) -> Call:
        x = d.array(kinds, d.shape(1, 3, 2))
        kwargs: dict[str, Any] = {"norm": d.one(NORMS)}
        if d.maybe():
            kwargs["axes"] = tuple(range(x.ndim))[int(d.rng.integers(x.ndim)) :]
            if d.maybe():
                kwargs["s"] = tuple(int(n) for n in d.rng.integers(2, 5, len(kwargs["axes"])))
        return (x,), kwargs

    return drawn


call("fft.fft", "fft.ifft")(_line(FC))
call("fft.rfft", "fft.ihfft")(_line(F))
call("fft.irfft", "fft.hfft")(_line(C))
call("fft.fftn", "fft.ifftn")(_grid(FC))
call("fft.rfftn")(_grid(F))
call("fft.irfftn")(_grid(C))


@call("fft.fftfreq", "fft.rfftfreq")
def _freq(d: Draw) -> Call:
    options = {"dtype": Named(d.one(F))} if d.maybe() else {}
    return (int(d.rng.integers(1, 9)),), {"d": float(d.one([1.0, 0.25])), **options}


@call("fft.fftshift", "fft.ifftshift")
def _shift(d: Draw) -> Call:
    x = d.array(FC, d.shape(1, 3))
    return (x,), {"axes": d.axes(x.ndim)}
