"""Conformance against a third party: the same calls put to `array_api_strict` and to extensor.

array_api_strict is the data-apis consortium's minimal implementation of the standard (2025.12).
Every function of its namespaces is called with arguments drawn at random (`array_api.calls`);
dtypes and shapes must agree, and values as far as `array_api.judge` says: bit for bit, or within a
bound. ARRAY_API_TESTS_MODULE names another namespace to judge, the same variable as in the
consortium's own test suite.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import operator
import os
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.array_api import make_strategies_namespace

from tests.array_api import calls, judge, matrices
from tests.array_api.draw import A, B, C, Call, Draw, F, N, Named, R, Z, promotes

strict: Any = pytest.importorskip("array_api_strict", reason="pip install array-api-strict")
xp: Any = importlib.import_module(os.environ.get("ARRAY_API_TESTS_MODULE", "extensor"))
EXAMPLES = int(os.environ.get("ARRAY_API_TESTS_EXAMPLES", "40"))
CALLS = calls.CALLS | matrices.CALLS
CONSTANTS = ("e", "inf", "nan", "newaxis", "pi")
DEFAULTS = ("arange", "asarray", "eye", "full", "linspace", "ones", "zeros", "fft.fftfreq",
            "fft.rfftfreq")  # fmt: skip
"""Made in the default dtype, which each library chooses, unless told."""
WIDER = ("take",)
"""With a default that is right in more cases: axis 0 where the standard asks for one."""
NO_RESULT = ("empty", "empty_like", "from_dlpack")
"""Values are unspecified, or it is no function of plain arguments: tested by themselves."""


def _names() -> list[str]:
    fft, linalg = strict.fft.__all__, {*strict.linalg.__all__, "eig", "eigvals"}
    main = [n for n in strict.__all__ if inspect.isfunction(getattr(strict, n))]
    own = [n for n in main if "flags" in n or n.startswith("_")]
    extensions = [*(f"linalg.{n}" for n in linalg), *(f"fft.{n}" for n in fft)]
    return sorted({*main, *extensions} - {*own, "Device"})


NAMES = _names()


def _function(module: Any, name: str) -> Any:
    return operator.attrgetter(name)(module)


def _put(module: Any, value: Any) -> Any:
    """An argument, in a library's own terms."""
    if isinstance(value, Named):
        return getattr(module, value)
    if isinstance(value, np.ndarray):
        return module.asarray(value.copy())  # some share the memory, and are written to
    if isinstance(value, (list, tuple)) and not isinstance(value, str):
        return type(value)(_put(module, v) for v in value)
    return value


def _array(value: Any) -> Any:
    if hasattr(value, "resolve_conj"):  # torch's, which numpy does not take as they are
        value = value.resolve_conj().resolve_neg()
    return np.asarray(value.detach() if hasattr(value, "detach") else value)


def _name(dtype: Any) -> str:
    text = str(dtype).rpartition(".")[2]
    return text.removesuffix("'>").removesuffix("_")


def _same(name: str, drawn: Call, got: Any, expected: Any, what: str) -> None:
    """Structure, dtypes, shapes and values of what function ``name`` gave for a call."""
    args, kwargs = drawn
    whole = _array(expected) if _is_array(expected) else expected

    def same(g: Any, w: Any, what: str) -> None:
        if hasattr(w, "_fields"):
            assert all(getattr(g, f) is part for f, part in zip(w._fields, g, strict=True)), what
        if isinstance(w, (tuple, list)):
            assert isinstance(g, (tuple, list)) and len(g) == len(w), what
            for one, other in zip(g, w, strict=True):
                same(one, other, what)
        elif _is_array(w):
            g, w = _alike(g, w, what)
            judge.compare(name, args, kwargs, whole, g, w, what)
        elif hasattr(w, "bits") and hasattr(w, "max"):
            for field in ("bits", "eps", "max", "min", "smallest_normal", "dtype"):
                if hasattr(w, field):
                    same(getattr(g, field), getattr(w, field), f"{what}.{field}")
        elif isinstance(w, strict._dtypes.DType):
            assert _name(g) == _name(w), f"{what}: {g}, expected {w}"
        else:
            assert type(g) is type(w) and g == w, f"{what}: {g!r}, expected {w!r}"

    same(got, expected, what)


def _is_array(value: Any) -> bool:
    return isinstance(value, strict._array_object.Array)


def _alike(got: Any, expected: Any, what: str) -> tuple[Any, Any]:
    """Both as numpy arrays, of one dtype and shape."""
    g, w = _array(got), _array(expected)
    assert g.dtype == w.dtype, f"{what}: dtype {g.dtype}, expected {w.dtype}"
    assert g.shape == w.shape, f"{what}: shape {g.shape}, expected {w.shape}"
    return g, w


def _factored(name: str, x: Any, got: Any, expected: Any, what: str) -> None:
    if name == "linalg.eigvals":
        judge.spectrum(x, *_alike(got, expected, what), what)
        return
    parts = [_alike(getattr(got, f), getattr(expected, f), what) for f in expected._fields]
    judge.factored(name, x, [g for g, _ in parts], what)
    if name == "linalg.eig":
        judge.spectrum(x, *parts[0], what)


def _unique(x: Any, got: Any, expected: Any, what: str) -> None:
    pairs = {f: _alike(getattr(got, f), getattr(expected, f), what) for f in expected._fields}
    mine, theirs = ({f: pair[i] for f, pair in pairs.items()} for i in (0, 1))
    judge.unique(x, mine, theirs, what)


def _scale(name: str, x: Any, kwargs: Any) -> float:
    """What a Fourier transform multiplies by: all that an impulse at the origin leaves."""
    impulse = np.zeros_like(x)
    impulse[(0,) * x.ndim] = 1
    return float(np.abs(_array(_function(strict, name)(strict.asarray(impulse), **kwargs))).max())


def _of_default(expected: Any) -> Any:
    """The judge's array in the dtype that the library under test takes for such numbers."""
    kind = {"f": "real floating", "c": "complex floating"}.get(_array(expected).dtype.kind)
    defaults = xp.__array_namespace_info__().default_dtypes()
    return strict.astype(expected, getattr(strict, _name(defaults[kind]))) if kind else expected


def _check(name: str, drawn: Call) -> bool:
    """Whether the standard takes the call; then extensor must give the same."""
    args, kwargs = drawn

    def put(module: Any) -> Any:
        given = {k: _put(module, v) for k, v in kwargs.items()}
        return _function(module, name)(*(_put(module, v) for v in args), **given)

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = put(strict)
        except (TypeError, ValueError, IndexError, NotImplementedError, np.linalg.LinAlgError):
            return False
        what = f"{name}{args!r:.400} {kwargs!r:.200}"
        got = put(xp)
        if name in DEFAULTS and "dtype" not in kwargs:
            expected = _of_default(expected)
        if name in judge.FACTORED:
            _factored(name, args[0], got, expected, what)
            return True
        if name in judge.PLACES:
            _unique(args[0], got, expected, what)
            return True
        told = {"scale": _scale(name, args[0], kwargs)} if name in judge.FOURIER else {}
        _same(name, (args, kwargs | told), got, expected, what)
    return True


def test_every_function_is_called() -> None:
    assert {n for n in NAMES if n not in CALLS} == set(NO_RESULT)
    assert {n for n in CALLS if n not in NAMES} == set()


def test_every_function_has_one_tolerance() -> None:
    classes = (judge.EXACT, judge.ELEMENTARY, set(judge.SUMMED), judge.FACTORED, judge.PLACES)
    assert sorted(itertools.chain(*classes)) == sorted(set(NAMES) - set(NO_RESULT))


@pytest.mark.parametrize("name", [*NAMES, *CONSTANTS, *A])
def test_has_name(name: str) -> None:
    assert _function(xp, name) is not None or name == "newaxis"


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    """Each parameter is there, can be passed in the standard's way, and has its default."""
    try:
        mine = inspect.signature(_function(xp, name)).parameters
    except ValueError:
        pytest.skip("a function of C that does not say; test_function calls it")
    places = list(mine.values())
    for i, expected in enumerate(inspect.signature(_function(strict, name)).parameters.values()):
        if expected.kind is expected.VAR_POSITIONAL:
            assert places[i].kind is expected.kind
            continue
        if expected.kind is expected.KEYWORD_ONLY:
            assert mine[expected.name].kind in (
                expected.KEYWORD_ONLY,
                expected.POSITIONAL_OR_KEYWORD,
            )
            got = mine[expected.name]
        else:
            got = places[i]
            allowed = {expected.kind, expected.POSITIONAL_OR_KEYWORD}
            assert got.kind in allowed
            if expected.kind is expected.POSITIONAL_OR_KEYWORD:
                assert got.name == expected.name
        # What the standard asks for may have a default here; strict has marks of its own for some.
        own = type(expected.default).__module__.startswith("array_api_strict")
        if expected.default is not expected.empty and not own and name not in WIDER:
            assert got.default == expected.default


@pytest.mark.parametrize("name", sorted(CALLS))
def test_function(name: str) -> None:
    seed = zlib.crc32(name.encode())
    taken = sum(_check(name, CALLS[name](Draw(seed + i))) for i in range(EXAMPLES))
    assert taken >= EXAMPLES // 4, "too few of the drawn calls are calls of the standard"


# --- the array object ----------------------------------------------------------------------------

BINARY = {
    "add": N, "sub": N, "mul": N, "truediv": F + C, "floordiv": R, "mod": R, "pow": R,
    "matmul": N, "and_": B + Z, "or_": B + Z, "xor": B + Z, "lshift": Z, "rshift": Z,
    "lt": R, "le": R, "gt": R, "ge": R, "eq": A, "ne": A,
}  # fmt: skip


def _operands(d: Draw, name: str) -> tuple[Any, Any]:
    if name == "matmul":
        return d.array(("float64",), (2, 3, 3)), d.array(F, (3, 3))
    low = 1 if name in ("floordiv", "mod", "pow", "lshift", "rshift") else -8
    return d.pair(BINARY[name], low=low, high=4)


FUNCTIONS = {"truediv": "divide", "mul": "multiply"}
"""Operators that `judge` knows by another name; those that it does not know are exact."""
PLAIN: Call = ((), {})
"""Of what is compared bit for bit, whatever the arguments."""


def _operate(name: str, function: Any, a: Any, b: Any) -> bool:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = function(_put(strict, a), _put(strict, b))
        except (TypeError, ValueError):
            return False
        got = function(_put(xp, a), _put(xp, b))
        what = f"{function.__name__} {a!r} {b!r}"
        _same(FUNCTIONS.get(name, name), ((a, b), {}), got, expected, what)
    return True


@pytest.mark.parametrize("name", BINARY)
def test_operator(name: str) -> None:
    function = getattr(operator, name)
    assert sum(_operate(name, function, *_operands(Draw(i), name)) for i in range(EXAMPLES)) > 5


@pytest.mark.parametrize("name", sorted(set(BINARY) - {"lt", "le", "gt", "ge", "eq", "ne"}))
def test_operator_in_place(name: str) -> None:
    function = getattr(operator, f"i{name.rstrip('_')}")
    assert sum(_operate(name, function, *_operands(Draw(i), name)) for i in range(EXAMPLES)) > 5


@pytest.mark.parametrize("name", ["abs", "neg", "pos", "invert"])
def test_operator_of_one(name: str) -> None:
    function = getattr(operator, name)
    for i in range(EXAMPLES):
        x = Draw(i).array(B + Z if name == "invert" else N, odd=True)
        _same(name, ((x,), {}), function(_put(xp, x)), function(_put(strict, x)), f"{name} {x!r}")


@pytest.mark.parametrize("kind", [bool, int, float, complex])
def test_casts_of_a_scalar(kind: type) -> None:
    allowed = {bool: A, int: B + R, float: B + R, complex: A}[kind]
    for name in allowed:
        x = np.asarray(3).astype(name)
        got, expected = kind(_put(xp, x)), kind(_put(strict, x))
        assert type(got) is kind and got == expected


@pytest.mark.parametrize("pair", [(a, b) for a in A for b in A if promotes(a, b)])
def test_promotion(pair: tuple[str, str]) -> None:
    a, b = (np.ones(2, name) for name in pair)
    got, expected = (m.result_type(*(_put(m, x) for x in (a, b))) for m in (xp, strict))
    _same("result_type", PLAIN, got, expected, str(pair))
    if "bool" not in pair:
        _operate("add", operator.add, a, b)


def _index(d: Draw, shape: tuple[int, ...]) -> Any:
    if d.rng.random() < 0.25:
        return d.array(B, shape)
    key: list[Any] = []
    arrays = d.maybe()
    count = int(d.rng.integers(len(shape) + 1)) if not arrays else len(shape)
    for n in shape[:count]:
        if arrays:
            key.append(d.one([int(d.rng.integers(-n, n)), d.rng.integers(-n, n, 3)]))
        else:
            low, high = sorted(int(v) for v in d.rng.integers(0, n + 1, 2))
            key.append(d.one([int(d.rng.integers(-n, n)), slice(low, high), slice(None, None, -1)]))
    if not arrays and count == len(shape) and d.maybe():
        key.append(...)
    if not arrays and d.maybe():
        key.insert(0, None)
    if not arrays and count < len(shape):
        key.append(...)
    return tuple(key)


def test_getitem() -> None:
    taken = 0
    for i in range(EXAMPLES * 4):
        d = Draw(i)
        x = d.array(A, d.shape(1, 3, 1))
        key = _index(d, x.shape)
        try:
            expected = _put(strict, x)[_put(strict, key)]
        except (TypeError, ValueError, IndexError):
            continue
        _same("getitem", PLAIN, _put(xp, x)[_put(xp, key)], expected, f"{x!r} {key!r}")
        taken += 1
    assert taken > EXAMPLES


def test_setitem() -> None:
    taken = 0
    for i in range(EXAMPLES * 4):
        d = Draw(i)
        x = d.array(A, d.shape(1, 3, 1))
        key = _index(d, x.shape)
        value = d.one([d.array((x.dtype.name,), ()), x.dtype.type(1).item()])
        made, expected = _put(xp, x.copy()), _put(strict, x.copy())
        try:
            expected[_put(strict, key)] = _put(strict, value)
        except (TypeError, ValueError, IndexError):
            continue
        made[_put(xp, key)] = _put(xp, value)
        _same("setitem", PLAIN, made, expected, f"{x!r} {key!r} {value!r}")
        taken += 1
    assert taken > EXAMPLES


def test_attributes() -> None:
    x = _put(xp, np.zeros((2, 3), np.float32))
    assert (x.ndim, x.shape, x.size) == (2, (2, 3), 6)
    assert x.mT.shape == x.T.shape == (3, 2)
    assert x.dtype == xp.float32 and x.device == x.to_device(x.device).device
    assert x.__array_namespace__(api_version="2025.12") is not None


def test_inspection() -> None:
    mine, expected = xp.__array_namespace_info__(), strict.__array_namespace_info__()
    assert mine.capabilities().keys() >= expected.capabilities().keys()
    assert mine.default_device() in mine.devices()
    assert mine.default_dtypes().keys() == expected.default_dtypes().keys()
    for kind in (None, "bool", "signed integer", "unsigned integer", "integral", "real floating",
                 "complex floating", "numeric", ("bool", "integral")):  # fmt: skip
        device = mine.default_device()
        assert mine.dtypes(device=device, kind=kind).keys() == expected.dtypes(kind=kind).keys()


# --- special values, from the standard's tables --------------------------------------------------


@pytest.mark.parametrize("name", F)
def test_special_values_of_empty_statistics(name: str) -> None:
    x = _put(xp, np.zeros(0, name))
    assert float(xp.sum(x)) == 0 and float(xp.prod(x)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in (xp.mean, xp.var, xp.std):
            assert np.isnan(float(function(x)))


@pytest.mark.parametrize("name", ["max", "mean", "min", "prod", "std", "sum", "var"])
def test_special_values_nan_shows(name: str) -> None:
    x = _put(xp, np.array([1.0, np.nan, 3.0]))
    assert np.isnan(float(getattr(xp, name)(x)))


INF = np.inf
FLOOR_DIVIDE = [
    (INF, 2.0, INF), (INF, -2.0, -INF), (-INF, 2.0, -INF), (-INF, -2.0, INF),
    (2.0, INF, 0.0), (2.0, -INF, -0.0), (-2.0, INF, -0.0), (-2.0, -INF, 0.0),
    (0.0, 2.0, 0.0), (-0.0, 2.0, -0.0), (0.0, -2.0, -0.0), (-0.0, -2.0, 0.0),
    (2.0, 0.0, INF), (2.0, -0.0, -INF), (-2.0, 0.0, -INF), (-2.0, -0.0, INF),
    (INF, INF, np.nan), (0.0, 0.0, np.nan), (np.nan, 1.0, np.nan), (1.0, np.nan, np.nan),
]  # fmt: skip
POW = [
    (1.0, INF, 1.0), (1.0, np.nan, 1.0), (np.nan, 0.0, 1.0), (2.0, INF, INF), (2.0, -INF, 0.0),
    (0.5, INF, 0.0), (0.5, -INF, INF), (-1.0, INF, 1.0), (INF, 2.0, INF), (INF, -2.0, 0.0),
    (-INF, 3.0, -INF), (-INF, 2.0, INF), (-INF, -3.0, -0.0), (-INF, -2.0, 0.0), (-INF, 0.5, INF),
    (0.0, 2.0, 0.0), (0.0, -2.0, INF), (-0.0, 3.0, -0.0), (-0.0, 2.0, 0.0), (-0.0, 0.5, 0.0),
    (-0.0, -3.0, -INF), (-0.0, -2.0, INF), (-2.0, 0.5, np.nan), (2.0, -0.0, 1.0),
]  # fmt: skip
REMAINDER = [
    (1.0, 0.0, np.nan), (INF, 2.0, np.nan), (0.0, 2.0, 0.0), (-0.0, 2.0, 0.0), (0.0, -2.0, -0.0),
    (-0.0, -2.0, -0.0), (3.0, INF, 3.0), (3.0, -INF, -INF), (-3.0, INF, INF), (-3.0, -INF, -3.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "a", "b", "expected"),
    [(n, *row) for n, rows in (("floor_divide", FLOOR_DIVIDE), ("pow", POW),
                               ("remainder", REMAINDER)) for row in rows],
)  # fmt: skip
def test_special_values(name: str, a: float, b: float, expected: float) -> None:
    for dtype, lanes in itertools.product(F, (1, 33)):  # a vector loop's tail has other code
        with np.errstate(all="ignore"):
            x, y = (_put(xp, np.full(lanes, v, dtype)) for v in (a, b))
            got = _array(getattr(xp, name)(x, y))
        np.testing.assert_array_equal(got, np.full(lanes, expected, dtype))
        if not np.isnan(expected):
            assert (np.signbit(got) == np.signbit(expected)).all()


def test_invalid_axes_are_index_errors() -> None:
    for axis in (-4, 3):
        with pytest.raises(IndexError):
            xp.expand_dims(_put(xp, np.zeros((2, 3))), axis=axis)
    with pytest.raises(ValueError):
        xp.squeeze(_put(xp, np.zeros((2, 3))), axis=0)


@given(data=st.data())
@settings(max_examples=EXAMPLES, derandomize=True)
def test_strategies_of_hypothesis(data: Any) -> None:
    """What the consortium's suite draws its arrays and keys with."""
    strategies = make_strategies_namespace(xp)
    x = data.draw(strategies.arrays(
        strategies.scalar_dtypes(), strategies.array_shapes(min_dims=0, min_side=0)))  # fmt: skip
    key = data.draw(strategies.indices(x.shape, allow_newaxis=True))
    np.testing.assert_array_equal(_array(x[key]), _array(x)[key])


def test_dlpack() -> None:
    for name in (*B, *N):
        x = _put(xp, np.ones((2, 3), name))
        expected = _put(strict, np.ones((2, 3), name))
        _same("from_dlpack", PLAIN, xp.from_dlpack(x), expected, name)
        assert x.__dlpack_device__()[0] == 1
    own = xp.from_dlpack(x, copy=True)
    own[0, 0] = 5
    assert complex(x[0, 0]) == 1
