"""On a GPU: torch's stream, memory and graphs. `test_bits` has the bits."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

from extensor.backends import registry

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import extensor as et  # noqa: E402
from extensor.torch import saved  # noqa: E402
from extensor_cuda.matmul import tuned  # noqa: E402
from tests.unit.torch import test_bits as bits  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() and registry.available("cuda")),
        reason="needs an NVIDIA GPU, torch with CUDA, and the extra cuda13",
    ),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns of its own code
]
RECIPES = ["mxfp4_all", "mxfp8_rebased", "nvfp4_nvidia", "mxfp4_tseng", "fp8_block"]


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    """Kernels at every size, as large layers have them; `test_bits` has small ones."""
    with tuned.always():
        yield


def network(recipe: str, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    model = model.to("cuda", torch.bfloat16)
    return ext.quantize_(model, recipe, seed=1, rules={"*": recipe})


def inputs(count: int, rows: int = 256) -> list[Any]:
    torch.manual_seed(1)
    return [torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def steps(model: nn.Module, call: Any, batches: list[Any]) -> list[Any]:
    """Results and gradients of training steps, and the clocks and weights that they leave."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for x in batches:
        optimizer.zero_grad()
        y = call(x)
        y.float().square().mean().backward()
        found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*found, *(t.detach().clone() for t in model.state_dict().values())]


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_give_the_bits_of_extensors_layer(recipe: str, dtype: Any) -> None:
    """Two passes, so that the second finds the first one's weight."""
    options = {"recipe": recipe, "seed": bits.SEED, "index": bits.INDEX, "dtype": dtype}
    with torch.device("cuda"):
        layer = ext.Linear(264, 136, **options)
        own = bits.own_layer(layer, recipe, et.nn.Linear(264, 136))
        for _ in range(2):
            x, g = torch.randn(200, 264, dtype=dtype), torch.randn(200, 136, dtype=dtype)
            bits.check_pass(layer, own, x, g)


@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp8_rebased"])
def test_a_pass_saves_the_operands_of_columns(recipe: str) -> None:
    """And an operator what it promised; values that E5M2 does not hold fall back to bfloat16."""
    layer = ext.Linear(264, 136, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(200, 264, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-12, 6, 264, device="cuda").bfloat16()
    weight, both = layer.weight.detach(), saved.savable(layer.quant_layer.number)
    numbers = layer.quant_clock, layer.quant_layer.number, torch.bfloat16, False
    g = torch.randn(200, 136, device="cuda", dtype=torch.bfloat16)
    found = []
    for saves in (0, both):
        out, *held = torch.ops.extensor.linear(x, weight, None, *numbers, saves)
        sizes = saved.sizes(x.shape, weight.shape, saves)
        assert [t.numel() for t in held] == list(sizes.values())
        assert len(held) == (2 if saves else 0)
        needs = [True, True, False]
        grads = torch.ops.extensor.linear_backward(g, x, weight, held, *numbers, saves, needs)
        found.append([out, *grads])
    assert equal(*found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_has_the_bits_of_an_eager_one(recipe: str) -> None:
    """Forward, backward and update in one torch.cuda.graph, replayed on new batches."""
    batches = inputs(4)
    model, other = network(recipe), network(recipe)
    expected = steps(model, model, [batches[0]] * 3 + batches)

    static = batches[0].clone()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        y = other(static)
        y.float().square().mean().backward()
        optimizer.step()
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    results = []
    for x in batches:
        static.copy_(x)
        graph.replay()
        results += [y.clone(), *(p.grad.clone() for p in other.parameters())]
    found = [*results, *(t.clone() for t in other.state_dict().values())]
    assert equal(expected[-len(found) :], found)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp8_rebased", "mxfp4_tseng"])
def test_compiled_steps_have_the_bits_of_eager_ones(recipe: str, mode: str | None) -> None:
    torch._dynamo.reset()
    batches = inputs(6)
    model, other = network(recipe), network(recipe)
    expected = steps(model, model, batches)
    compiled = torch.compile(other, fullgraph=True, mode=mode)
    assert equal(expected, steps(other, compiled, batches))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_checkpoint_changes_no_bit(mode: str | None) -> None:
    torch._dynamo.reset()
    batches, kept = inputs(6), {"use_reentrant": False, "context_fn": ext.checkpoint_contexts}
    model, other = network("mxfp4_tseng"), network("mxfp4_tseng")
    expected = steps(model, model, batches)
    region = torch.compile(lambda x: checkpoint(other, x, **kept), fullgraph=True, mode=mode)
    assert equal(expected, steps(other, region, batches))


def test_batches_of_other_sizes_compile_twice_at_most() -> None:
    torch._dynamo.reset()
    model = network("mxfp4_all")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = torch.compile(model, fullgraph=True)
    for rows in (128, 256, 384, 512):
        compiled(inputs(1, rows)[0]).float().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_waits_for_the_gpu(recipe: str) -> None:
    model, (x,) = network(recipe), inputs(1)
    for _ in range(3):
        model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    start = time.perf_counter()
    model(x).sum().backward()
    seen = time.perf_counter() - start
    torch.cuda.synchronize()
    assert seen < 0.5 * (time.perf_counter() - start)


def test_memory_is_torchs() -> None:
    import cupy

    model, (x,) = network("mxfp4_all", 256), inputs(1, 8192)
    model(x).sum().backward()
    used = cupy.get_default_memory_pool().used_bytes()
    y = model(x)
    y.sum().backward()
    grown = cupy.get_default_memory_pool().used_bytes() - used
    assert grown < 1 << 18  # counters
    assert y.untyped_storage().nbytes() == y.numel() * 2


def test_a_side_stream_is_used() -> None:
    model, (x,) = network("mxfp8_rebased"), inputs(1)
    expected = model(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        y = model(x)
        event = side.record_event()
    assert not event.query()  # the layer's kernels are behind the sleep
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_telemetry_is_counted_by_layer() -> None:
    model, (x,) = network("mxfp4_all"), inputs(1)
    model(x).sum().backward()
    counts = ext.telemetry(model)
    assert counts["0", "fprop.x"].count == x.numel()
    assert {path for path, _ in counts} == {"0", "2"}


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4", "mxfp8_e4m3", "fp8_e4m3", "int8"])
def test_packing_is_captured(spec: str) -> None:
    """And waits for nothing: a graph refuses that."""
    first, second = inputs(2)
    ext.to_blocked(first, spec)
    static, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = ext.to_blocked(static, spec)
    static.copy_(second)
    graph.replay()
    expected = ext.to_blocked(second.cpu(), spec)
    assert q.parts.keys() == expected.parts.keys()
    assert all(torch.equal(part.cpu(), expected.parts[name]) for name, part in q.parts.items())


def test_packing_on_the_host_is_not_captured() -> None:
    (x,), spec = inputs(1), et.QuantSpec("mxfp8_e4m3", statistic="percentile", percentile=90.0)
    ext.to_blocked(x, spec)
    with pytest.raises(RuntimeError, match="percentile"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ext.to_blocked(x, spec)


def far_apart(rows: int = 256) -> Any:
    """An input whose rows no power of two brings within E5M2."""
    (x,) = inputs(1, rows)
    x[rows // 2 :] *= 2.0**-40
    return x


def test_fallbacks_are_counted_by_layer() -> None:
    model, backend = network("mxfp4_all"), registry.get("cuda")
    before = backend.fallback_count
    model[0](far_apart()).float().sum().backward()
    model[2](torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    counts = {key: stats.fallbacks for key, stats in ext.telemetry(model).items()}
    fell = {key for key, count in counts.items() if count}
    assert ("0", "fprop.x") in fell and {path for path, _ in fell} == {"0"}
    assert sum(counts.values()) == backend.fallback_count - before
    ext.reset_telemetry(model)
    assert ext.telemetry(model) == {}


def test_a_capture_may_be_the_first_to_fall_back() -> None:
    """Counts of replays are by layer, too; the steps before the capture stay within E5M2."""
    model, x = network("mxfp4_all"), far_apart()
    static = inputs(1)[0]
    for _ in range(3):
        model(static).float().sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(static).float().sum().backward()
    ext.reset_telemetry(model)
    static.copy_(x)
    for _ in range(3):
        graph.replay()
    assert ext.telemetry(model)["0", "fprop.x"].fallbacks == 3


@pytest.mark.parametrize("how", ["graph", "reduce-overhead"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_count_what_eager_steps_count(recipe: str, how: str) -> None:
    torch._dynamo.reset()
    batches, warm = inputs(4), 3
    model, other = network(recipe), network(recipe)
    steps(model, model, [batches[0]] * warm)
    ext.reset_telemetry(model)
    steps(model, model, batches)
    expected = ext.telemetry(model)
    if how == "reduce-overhead":
        compiled = torch.compile(other, fullgraph=True, mode=how)
        steps(other, compiled, [batches[0]] * warm)
        ext.reset_telemetry(other)
        steps(other, compiled, batches)
    else:
        static, optimizer = batches[0].clone(), torch.optim.SGD(other.parameters(), 0.1)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            other(static).float().square().mean().backward()
            optimizer.step()

        for _ in range(warm):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        ext.reset_telemetry(other)
        for x in batches:
            static.copy_(x)
            graph.replay()
    found = ext.telemetry(other)
    assert {k: v for k, v in found.items() if v.count} == expected


def test_copies_carry_counts_and_no_memory_of_cupys() -> None:
    model, (x,) = network("mxfp4_all"), inputs(1)
    model(x).sum().backward()
    held = pickle.dumps(model.cpu())
    assert b"cupy" not in held
    found = [ext.telemetry(each) for each in (model, pickle.loads(held), copy.deepcopy(model))]
    assert found[0] and found == [found[0]] * 3


def test_a_model_moves_with_its_clock_and_bits() -> None:
    """To the GPU and back: the same bits as a model that was made there."""
    model, other = network("mxfp4_all"), network("mxfp4_all").cpu()
    batches = inputs(2)
    expected = steps(model, model, batches)
    other.cuda()
    assert other[0].quant_clock.is_cuda
    assert equal(expected, steps(other, other, batches))
    other.cpu()
    assert int(other[0].quant_clock) == 2
    other(batches[0].cpu()).float().sum().backward()
    with pytest.raises(ValueError, match="all on one device, got input on cuda:0, weight on cpu"):
        other(batches[0])
    for part in ("bias", "quant_clock"):  # a kernel would read the host's memory
        layer = network("mxfp4_all")[0]
        tensor = getattr(layer, part).detach().cpu()
        setattr(layer, part, nn.Parameter(tensor) if part == "bias" else tensor)
        with pytest.raises(ValueError, match=f"all on one device, .*{part} on cpu"):
            layer(batches[0])


@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp8_rebased", "nvfp4_nvidia"])
def test_operators_pass_opcheck(recipe: str) -> None:
    torch.manual_seed(0)
    layer = ext.Linear(256, 128, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    saves = saved.savable(layer.quant_layer.number)
    numbers = layer.quant_clock, layer.quant_layer.number, torch.bfloat16, False, saves
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if recipe != "mxfp8_rebased":  # it returns scales with room behind them, whose bytes are chance
        checks.append("test_aot_dispatch_dynamic")
    given = x, layer.weight, layer.bias, *numbers
    torch.library.opcheck(torch.ops.extensor.linear, given, test_utils=checks)
    out, *held = torch.ops.extensor.linear(x.detach(), layer.weight.detach(), None, *numbers)
    backward = torch.randn_like(out), x.detach(), layer.weight.detach(), held, *numbers
    torch.library.opcheck(torch.ops.extensor.linear_backward, (*backward, [True, True, True]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_and_autocast_change_no_bit(recipe: str) -> None:
    """A recomputed pass draws its bits again; autocast's bfloat16 is that of a cast input."""
    plain, saving, cast = network(recipe), network(recipe), network(recipe)
    x = inputs(1)[0].requires_grad_()

    def checkpointed(x: Any) -> Any:
        return checkpoint(saving, x, use_reentrant=False)

    def autocast(x: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return cast(x.float())

    expected = steps(plain, plain, [x, x])
    assert equal(expected, steps(saving, checkpointed, [x, x]))
    assert equal(expected, steps(cast, autocast, [x, x]))


def test_a_run_resumes_with_the_same_bits() -> None:
    whole, first, second = (network("mxfp4_all") for _ in range(3))
    batches = inputs(4)
    expected = steps(whole, whole, batches)
    steps(first, first, batches[:2])
    second.load_state_dict(first.state_dict())
    found = steps(second, second, batches[2:])
    assert equal(expected[-len(found) :], found)
