"""Steps that the CPU repeats without their Python: the step's own bits, or an error."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import ExTensor, models, nn
from extensor.autograd.recording import replayed
from extensor.autograd.tensor import wrap
from extensor.quant.schemes import SCHEMES

RNG = np.random.default_rng(0)


def tensor(*shape: int) -> ExTensor:
    return ExTensor(RNG.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("scheme", [None, "mxfp4_weights", "mxfp4_a8"])
def test_inference_is_repeated_with_its_own_bits(scheme: str | None) -> None:
    model: Any = models.build("lenet", models.config("lenet", "lenet5"), np.random.default_rng(0))
    model.eval()
    model = model if scheme is None else et.quantize_model(model, scheme)
    calls = []

    def step(x: ExTensor) -> tuple[ExTensor, ExTensor]:
        calls.append(x.shape)
        y = model(x)
        return y.softmax(), (y * 2.0).sum()

    captured = et.capture(step)
    with et.no_grad():
        for number in range(6):
            x = tensor(2, 1, 28, 28)
            got, expected = captured(x), step(x)
            for mine, theirs in zip(got, expected, strict=True):
                assert mine.numpy().tobytes() == theirs.numpy().tobytes(), number
        assert len(calls) == 3 + 6
        captured(tensor(3, 1, 28, 28))  # another shape is another program
        assert len(calls) == 10
        parameter = next(iter(captured._recorded.values()))
        assert parameter.program is not None


@pytest.mark.parametrize("shape", [(3, 32), (2, 3, 32)])
def test_packed_weights_and_rows_of_any_axes(shape: tuple[int, ...]) -> None:
    layer = et.quantize_model(nn.Sequential(nn.Linear(32, 8, rng=0)), "mxfp4_weights")
    captured = et.capture(layer)
    with et.no_grad():
        for _ in range(5):
            x = tensor(*shape)
            expected = layer(x)
            got = captured(x)
            assert (
                got.shape == expected.shape and got.numpy().tobytes() == expected.numpy().tobytes()
            )


@pytest.mark.parametrize("scheme", [n for n, s in SCHEMES.items() if s.activations != "float32"])
@pytest.mark.parametrize("factor", [1.0, 2.0**30], ids=["weights", "large weights"])
def test_activations_in_blocks_are_repeated_with_their_own_bits(scheme: str, factor: float) -> None:
    """Also where their values decide how products are made, beyond what float32 holds."""
    model = nn.Sequential(nn.Linear(512, 40, bias=False, rng=0))
    model[0].weight.data *= np.float32(factor)
    ranged = [tensor(4, 512)] if SCHEMES[scheme].range is not None else None
    quantized = et.quantize_model(model, scheme, ranged)
    with et.no_grad(), np.errstate(all="ignore"):
        captured = et.capture(quantized)
        for exponent in (0, 0, 0, 0, 30, 75, 100, 120, -60, -120):
            powers = np.exp2(RNG.integers(-12, 1, (1, 512)) + exponent)
            x = ExTensor((RNG.standard_normal((1, 512)) * powers).astype(np.float32))
            assert captured(x).numpy().tobytes() == quantized(x).numpy().tobytes(), exponent


def test_an_input_is_cast_in_each_repetition() -> None:
    w = tensor(4, 6)
    captured = et.capture(lambda x, y: (x * w + y) @ w.T)
    with et.no_grad():
        for _ in range(6):
            x, y = tensor(4, 6).astype("bfloat16"), tensor(6).astype("float16")
            expected = (x * w + y) @ w.T
            assert captured(x, y).numpy().tobytes() == expected.numpy().tobytes()


def test_a_program_sees_parameters_that_are_written_between_calls() -> None:
    layer = nn.Linear(8, 4, rng=0)
    captured = et.capture(lambda x: layer(x))
    with et.no_grad():
        for _ in range(5):
            x = tensor(3, 8)
            assert captured(x).numpy().tobytes() == layer(x).numpy().tobytes()
            layer.weight.copy_(tensor(4, 8))


@pytest.mark.parametrize("storage", [None, "mxfp8_e4m3"])
def test_a_decoder_with_a_cache_that_grows(storage: str | None) -> None:
    config = models.config("llama", "nano")
    model = et.quantize_model(
        models.build("llama", config, np.random.default_rng(0)), "mxfp4_weights"
    )
    caches = [nn.KVCache(config.layers, capacity=4, storage=storage) for _ in range(2)]
    captured = et.capture(lambda tokens: model(tokens, cache=caches[1]))
    with et.no_grad():
        for token in range(12):
            tokens = ExTensor(np.array([[token * 5 % 65]], np.int64))
            eager = model(tokens, cache=caches[0])
            assert captured(tokens).numpy().tobytes() == eager.numpy().tobytes(), token
        assert caches[1].length == caches[0].length == 12


def test_generate_repeats_the_recorded_step() -> None:
    config = models.config("llama", "nano")
    model = models.build("llama", config, np.random.default_rng(0))
    assert model.recordable
    prompt = [[1, 2, 3], [4, 5, 6]]
    alone = et.generate(model, prompt, max_new_tokens=9)
    cached = et.generate(model, prompt, max_new_tokens=9, cache=nn.KVCache(config.layers, 4))
    assert cached.tolist() == alone.tolist()


def test_positions_beyond_the_context_are_an_error_in_a_replay_too() -> None:
    config = models.config("llama", "nano")
    model = models.build("llama", config, np.random.default_rng(0))
    cache = nn.KVCache(config.layers)
    captured = et.capture(lambda tokens: model(tokens, cache=cache))
    tokens = ExTensor(np.zeros((1, 1), np.int64))
    with et.no_grad():
        for _ in range(4):
            captured(tokens)
        cache.advance(config.context - 4)
        with pytest.raises(ValueError, match="positions below the context of 256"):
            captured(tokens)


WEIGHT = tensor(4)
INNER = et.capture(lambda y: y * 2.0)
STATE = {"scale": 0}


def changing(x: ExTensor) -> ExTensor:
    STATE["scale"] += 1
    return x * float(STATE["scale"])


def another_shape(x: ExTensor) -> ExTensor:
    STATE["scale"] += 1
    return x.reshape((2, 2)) if STATE["scale"] % 2 else x.reshape((4, 1))


def with_gradient(x: ExTensor) -> ExTensor:
    with et.enable_grad():
        return x * 2.0


def written(x: ExTensor) -> ExTensor:
    y = x * 2.0
    y[0] = 1.0
    return y


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (lambda x: x * x.sum().item(), "reads a tensor's values"),
        (lambda x: ExTensor(x.numpy() + 1), "reads a tensor's values"),
        (written, "writes to a tensor in place"),
        (lambda x: x + ExTensor(np.ones(4, np.float32)), "add reads an array that Python makes"),
        (changing, "mul.* reads an array that Python makes"),
        (another_shape, "an option of reshape changed"),
        (with_gradient, r"runs outside of et.no_grad\(\)"),
        (lambda x: WEIGHT, "the step's result is made by Python"),
        (lambda x: INNER(x), "another captured"),
    ],
)
def test_what_cannot_be_repeated_is_an_error(step: Any, match: str) -> None:
    captured = et.capture(step)
    with et.no_grad():
        captured(tensor(4))
        with pytest.raises(RuntimeError, match=match):
            captured(tensor(4)), captured(tensor(4))
    assert (tensor(2) * 2.0).shape == (2,)  # nothing is recorded any more


def test_a_layer_with_a_window_is_an_error() -> None:
    config = dataclasses.replace(models.config("llama", "nano"), windows=(4, 4))
    model = models.build("llama", config, np.random.default_rng(0))
    captured = et.capture(lambda tokens: model(tokens, cache=cache))
    cache = nn.KVCache(config.layers)
    tokens = ExTensor(np.zeros((1, 1), np.int64))
    with et.no_grad():
        captured(tokens)
        with pytest.raises(RuntimeError, match="sliding window"):
            captured(tokens)


def test_steps_with_gradients_are_called_as_they_are() -> None:
    layer, calls = nn.Linear(4, 1, rng=0), []

    def step(x: ExTensor) -> ExTensor:
        calls.append(1)
        layer.weight.grad = None
        loss = layer(x).sum()
        loss.backward()
        return loss

    captured = et.capture(step)
    for _ in range(5):
        captured(tensor(3, 4))
    assert len(calls) == 5


def test_python_that_runs_again_is_not_recorded_itself() -> None:
    seen: list[float] = []

    def note(x: Any) -> Any:
        seen.append(float(x[0]))
        return x + 1

    captured = et.capture(lambda x: wrap(replayed("note", note, (x * 2.0).data), x.backend) * 1.0)
    with et.no_grad():
        for value in range(5):
            x = ExTensor(np.full(4, value, np.float32))
            assert captured(x).tolist() == [2.0 * value + 1] * 4
    assert seen == [0, 2, 4, 6, 8]


def test_a_decoder_whose_embedding_is_packed() -> None:
    """As read from a file: one matrix in blocks for the tokens and for the scores."""
    model = models.build("llama", models.config("llama", "nano"), np.random.default_rng(0))
    packed = nn.Buffer(model.lm_head.weight.detach().quantize("mxfp4").data)
    for layer in (model.model.embed_tokens, model.lm_head):
        del layer.weight
        layer.weight = packed
    caches = [nn.KVCache(2) for _ in range(2)]
    captured = et.capture(lambda tokens: model(tokens, cache=caches[1]))
    with et.no_grad():
        for token in range(6):
            tokens = ExTensor(np.array([[token * 11 % 65]], np.int64))
            eager = model(tokens, cache=caches[0])
            assert captured(tokens).numpy().tobytes() == eager.numpy().tobytes(), token
        for wrong in (-1, 65):
            with pytest.raises(ValueError, match=r"expected numbers in 0\.\.64"):
                captured(ExTensor(np.array([[wrong]], np.int64)))


@pytest.mark.parametrize("scheme", ["mxfp4_weights", "mxfp4_mxint8"])
def test_a_decoded_token_is_mostly_kernels_without_python(scheme: str) -> None:
    config = models.config("llama", "nano")
    model = models.build("llama", config, np.random.default_rng(0))
    model = et.quantize_model(model, scheme)
    if model.lm_head.weight.backend.core is None:
        pytest.skip("no C++ core")
    cache = nn.KVCache(config.layers, capacity=64)
    captured = et.capture(lambda tokens: model(tokens, cache=cache))
    with et.no_grad():
        for token in range(5):
            captured(ExTensor(np.array([[token]], np.int64)))
    (recorded,) = captured._recorded.values()
    assert recorded.program is not None
    scope = recorded.program._run.__globals__
    steps = [value for name, value in scope.items() if name[0] == "f" and name[1:].isdigit()]
    python = [step for step in steps if type(step).__name__ != "Replay"]
    assert len(python) <= 5  # none of a layer: its cache and attention are one kernel
    assert len(steps) < 100


@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_one_row_that_follow_each_other_are_one_call(threads: int) -> None:
    formats = ("mxfp4", "mxfp4", "mxfp4", "nvfp4", "nvfp4", "int8", "int8", "mxfp4")
    sizes = (36, 4, 130, 50, 7, 9, 1000, 5)
    x = tensor(1, 288)
    weights = [tensor(n, 288).quantize(name) for n, name in zip(sizes, formats, strict=True)]
    core = x.backend.core
    if core is None:
        pytest.skip("no C++ core")
    before = core.threads()
    captured = et.capture(lambda x: tuple(et.linear(x, w) for w in weights))
    core.set_threads(threads)
    try:
        with et.no_grad():
            for number in range(6):
                x = tensor(1, 288)
                expected = [et.linear(x, w) for w in weights]
                for mine, theirs in zip(captured(x), expected, strict=True):
                    assert mine.numpy().tobytes() == theirs.numpy().tobytes(), number
    finally:
        core.set_threads(before)
    (recorded,) = captured._recorded.values()
    assert recorded.program is not None
    replay = recorded.program._run.__globals__["f0"]
    cpu = Path("/proc/cpuinfo")
    vbmi = cpu.exists() and {"avx512_vnni", "avx512vbmi"} <= set(cpu.read_text().split())
    if vbmi and core.gemm_instructions() == "avx512_vnni":
        assert len(replay) == 4
    else:
        assert len(replay) == len(weights)


FORMATS = {
    "4 bits": ("mxfp4", {}),
    "zero points": ("int4", {"symmetric": False}),
    "Q4_K": ("int4", {"tile": (1, 32), "minimum": True, "super_block": 256}),
    "super-blocks": ("int4", {"tile": (1, 16), "super_block": 64}),
    "6 bits": ("mxfp6_e2m3", {}),
    "6 bits in two bytes": ("mxfp6_e3m2", {}),
    "8 bits": ("int8", {}),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_first_row_and_all_rows_are_apart(kind: str) -> None:
    """The first row begins where all of them do; a classifier of BERT's first token reads it."""
    name, options = FORMATS[kind]
    spec = et.QuantSpec(name, **options)
    weights = [tensor(n, 256).quantize(spec) for n in (16, 9, 7, 12, 5)]

    def step(x: ExTensor) -> list[ExTensor]:
        rows = (x[:, 0], x, x[:, 0], x[:, :1], x[:, :2])
        return [et.linear(part, w) for part, w in zip(rows, weights, strict=True)]

    captured = et.capture(step)
    with et.no_grad():
        for number in range(6):
            x = tensor(1, 4, 256)
            for mine, theirs in zip(captured(x), step(x), strict=True):
                assert mine.numpy().tobytes() == theirs.numpy().tobytes(), number
    (recorded,) = captured._recorded.values()
    assert recorded.program is not None


def test_kernels_whose_result_python_changes_are_not_repeated_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = tensor(2, 8)
    kind = type(x.backend)
    add = kind.add

    def changed(self: Any, a: Any, b: Any) -> Any:
        out = add(self, a, b)
        out += 1
        return out

    monkeypatch.setattr(kind, "add", changed)
    captured = et.capture(lambda x: (x + x) * 2.0)
    with et.no_grad():
        for _ in range(6):
            x = tensor(2, 8)
            assert captured(x).tolist() == ((x + x) * 2.0).tolist()


def test_threads_that_repeat_one_step_do_not_get_each_others_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread repeats it whole as soon as the first of this one's results is handed out."""
    weights = [tensor(8, 32).quantize("mxfp4") for _ in range(2)]
    mine, others = tensor(1, 32), tensor(1, 32)

    def step(x: ExTensor) -> tuple[ExTensor, ...]:
        return tuple(et.linear(x, w) for w in weights)

    captured = et.capture(step)
    threads: list[threading.Thread] = []

    def repeat() -> None:
        with et.no_grad():
            captured(others)

    def interrupted(array: Any, backend: Any) -> ExTensor:
        if not threads:
            threads.append(threading.Thread(target=repeat))
            threads[0].start()
            threads[0].join(60)
        return wrap(array, backend)

    with et.no_grad():
        expected = step(mine)
        for _ in range(4):
            captured(mine)
        monkeypatch.setattr("extensor.autograd.capture.wrap", interrupted)
        for got, wanted in zip(captured(mine), expected, strict=True):
            assert np.array_equal(got.numpy(), wanted.numpy())
    assert not threads[0].is_alive()


def test_a_thread_that_sees_a_program_knows_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(self: Any, name: str, value: Any) -> None:
        if name == "program" and value is not None:
            seen.append(self.outputs)
        object.__setattr__(self, name, value)

    monkeypatch.setattr("extensor.autograd.capture._RecordedStep.__setattr__", noted)
    captured = et.capture(lambda x: x * 2.0)
    with et.no_grad():
        for _ in range(4):
            captured(et.ones(2))
    assert len(seen) == 1 and seen[0] is not None


@pytest.mark.parametrize("scheme", [None, "mxfp4_weights", "mxfp8"])
def test_weights_loaded_after_recording_are_read(scheme: str | None) -> None:
    """On the CPU `assign_` gives a tensor other memory."""
    one, other = (
        model if scheme is None else et.quantize_model(model, scheme)
        for model in (nn.Sequential(nn.Linear(64, 32, rng=seed)) for seed in (0, 1))
    )
    x = et.randn((2, 64), seed=0)
    step = et.capture(lambda x: one(x))
    with et.no_grad():
        for _ in range(4):
            before = step(x)
        one.load_state_dict(other.state_dict())
        for _ in range(4):
            after = step(x)
            np.testing.assert_array_equal(after.numpy(), other(x).numpy())
    assert not np.array_equal(before.numpy(), after.numpy())
    replays = next(iter(step._recorded.values()))
    assert replays.program is not None  # recorded again


def test_running_statistics_of_training_are_read() -> None:
    norm = nn.BatchNorm2d(3)
    step, x = et.capture(lambda x: norm(x)), et.randn((2, 3, 4, 4), seed=0)
    for _ in range(2):
        norm.eval()
        with et.no_grad():
            for _ in range(4):
                np.testing.assert_array_equal(step(x).numpy(), norm(x).numpy())
        norm.train()
        norm(x * 3 + 1)
