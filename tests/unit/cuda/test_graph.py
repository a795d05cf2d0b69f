"""What a captured step may do, and what is said of what cannot be captured.

Without a GPU on one made of numpy: `tests.unit.cuda.fake_backend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.console import Console

import extensor as et
from extensor.nn.recipe import apply_recipe
from extensor.optim import SGD, RMSprop, WarmupCosine
from extensor_cuda.runtime import placement
from tests.unit.cuda import fake
from tests.unit.cuda.graphs import Wrap, both, same

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def small_arrays_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are: `extensor_cuda.runtime.placement`."""
    monkeypatch.setattr(placement, "LEAST", 1)


def test_a_bad_gradient_stops_captured_updates_inside_backward(gpu: Any) -> None:
    layer = et.nn.Linear(8, 4, rng=0).to("cuda")
    by = SGD(layer.named_parameters(), lr=0.1)

    def step(x: et.ExTensor) -> et.ExTensor:
        with by.step_in_backward():
            (loss := layer(x).sum()).backward()
        return loss

    call, x = et.capture(step), et.randn((5, 8), seed=1).to("cuda")
    for _ in range(3):
        call(x)
    call(x * np.inf)
    before = weights(layer)
    call(x)
    with pytest.raises(FloatingPointError, match="in that of weight"):
        call.check()
    assert weights(layer) == before


def test_a_closed_step_is_captured_anew(gpu: Any) -> None:
    def made(close: bool) -> list[float]:
        layer = et.nn.Linear(8, 4, rng=0).to("cuda")
        by = SGD(layer.named_parameters(), lr=0.1)

        def step(x: et.ExTensor) -> et.ExTensor:
            by.zero_grad()
            (loss := layer(x).square().sum()).backward()
            by.step()
            return loss

        call, x, losses = et.capture(step), et.randn((5, 8), seed=1).to("cuda"), []
        for number in range(9):
            losses.append(call(x).item())
            if close and number == 4:
                graphs = [mine.graph for mine in call._graphs.values()]
                call.close()
                assert call.nbytes == 0 and [graph._graph for graph in graphs] == [None]
        return losses

    losses = made(close=True)
    assert losses == made(close=False) and len(set(losses)) == 9


def small(step: Any, recipe: str = "fp32") -> tuple[Any, Any, list[et.ExTensor]]:
    """A layer, an optimizer and a batch on the device, for steps of all kinds."""
    layer = et.nn.Linear(8, 4, rng=0).to("cuda")
    inputs = et.randn((5, 8), seed=1).to("cuda")
    labels = et.asarray([0, 1, 2, 3, 0]).to("cuda")
    return layer, step(layer), [inputs, labels]


def plain_step(
    layer: Any, change: Any = None, wrap: Wrap = et.capture, states: str = "float32"
) -> tuple[Any, Any]:
    by = SGD(layer.named_parameters(), lr=0.1, momentum=0.5, states=states)

    def step(inputs: et.ExTensor, labels: et.ExTensor) -> et.ExTensor:
        by.zero_grad()
        loss = et.cross_entropy(layer(inputs), labels)
        if change is not None:
            loss = change(loss)
        loss.backward()
        by.step()
        return loss

    return by, wrap(step)


def weights(layer: Any) -> bytes:
    return b"".join(a.tobytes() for a in layer.state_dict().values())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda loss: loss * float(loss), "float"),
        (lambda loss: loss if loss > 0 else -loss, "test_graph.py"),
        (lambda loss: (loss * et.asarray([2.0]).to("cuda")).sum(), "copied from the host"),
    ],
)
def test_what_a_graph_cannot_hold_is_named_and_changes_nothing(
    gpu: Any, change: Any, line: str
) -> None:
    layer, (by, train), batch = small(lambda layer: plain_step(layer, change))
    for _ in range(2):
        train(*batch)
    before = weights(layer)
    with pytest.raises(RuntimeError, match="cannot be captured.*move that out of the step") as got:
        train(*batch)
    assert line in str(got.value)
    assert weights(layer) == before
    loss = et.cross_entropy(layer(batch[0]), batch[1])  # eager steps go on
    by.zero_grad()
    loss.backward()
    by.step()
    assert weights(layer) != before and by.state_dict()["step.weight"] == 3


def test_a_label_that_is_no_class_stops_updates_and_is_reported(gpu: Any) -> None:
    layer, (_, train), (inputs, labels) = small(plain_step)
    for _ in range(3):
        train(inputs, labels)
    before = weights(layer)
    for wrong in (labels + 2, labels):
        train(inputs, wrong)
    with pytest.raises(ValueError, match="labels: expected 0..3 for 4 classes") as got:
        train.check()
    assert "no update was made" in "".join(got.value.__notes__)
    assert weights(layer) == before


def test_labels_may_be_left_out(gpu: Any) -> None:
    def run(wrap: Wrap) -> Any:
        layer = et.nn.Linear(8, 4, rng=0).to("cuda")
        by = SGD(layer.named_parameters(), lr=0.1)

        def step(x: et.ExTensor, labels: et.ExTensor) -> Any:
            by.zero_grad()
            loss = et.cross_entropy(layer(x), labels, ignore_index=-1)
            loss.backward()
            by.step()
            return loss

        train, losses = wrap(step), []
        for number in range(6):
            labels = et.asarray([0, -1, 2, 3 if number % 2 else -1, -1]).to("cuda")
            losses.append(float(train(et.randn((5, 8), seed=number).to("cuda"), labels)))
        with pytest.raises(ValueError, match="all 5 are left out"):
            step(et.ones((5, 8), device="cuda"), et.asarray([-1] * 5).to("cuda"))
        return losses, layer.state_dict()

    both(run)


def test_a_gradient_that_is_not_finite_stops_updates_and_is_reported(gpu: Any) -> None:
    layer, (by, train), (inputs, labels) = small(plain_step)
    for _ in range(3):
        train(inputs, labels)
    before = weights(layer)
    for values in (inputs * np.inf, inputs):
        train(values, labels)
    with pytest.raises(FloatingPointError, match="in that of weight"):
        by.state_dict()
    assert weights(layer) == before


def test_an_option_that_changes_is_an_error_and_a_learning_rate_is_not(gpu: Any) -> None:
    layer, (by, train), batch = small(plain_step)
    for _ in range(3):
        train(*batch)
    before = weights(layer)
    by.groups[0].options["lr"] = 0.0
    train(*batch)
    assert weights(layer) == before
    by.groups[0].options["momentum"] = 0.25
    with pytest.raises(RuntimeError, match="options of parameter group 0 was.*capture it again"):
        train(*batch)


def test_learning_rates_that_nobody_predicted_are_taken(gpu: Any) -> None:
    def run(wrap: Wrap) -> Any:
        layer, (by, train), batch = small(lambda layer: plain_step(layer, wrap=wrap))
        for number in range(24):
            # as a schedule says for a while, then by hand, then constant
            if number < 12:
                WarmupCosine(3, 40).apply(by, number)
            elif number < 16:
                by.groups[0].options["lr"] = 0.1 / number
            train(*batch)
        return layer.state_dict(), by.state_dict()

    both(run)


def test_rows_are_written_ahead_where_they_are_known(gpu: Any) -> None:
    _, (by, train), batch = small(plain_step)
    for number in range(12):
        WarmupCosine(3, 40).apply(by, number)
        train(*batch)
    (repeated,) = train._graphs.values()
    capture = repeated.graph._capture
    assert capture.replays == 10 and len(capture._predicted) == 8  # 1, 2, 4 and 8


def test_each_replay_outdates_what_was_made_of_weights(gpu: Any) -> None:
    """Else an evaluation would multiply the operands of an earlier one."""
    layer, (_, train), batch = small(plain_step)
    for number in range(6):
        before = [p._version[0] for p in layer.parameters()]
        train(*batch)
        after = [p._version[0] for p in layer.parameters()]
        assert all(b > a for a, b in zip(before, after, strict=True)), number


def test_what_lasts_lies_apart_from_what_a_step_drops(gpu: Any) -> None:
    _, (_, train), batch = small(plain_step)
    for _ in range(3):
        train(*batch)
    (repeated,) = train._graphs.values()
    capture, graph = repeated.graph._capture, repeated.graph
    if isinstance(capture._kept[0], fake.Device):
        assert {array.home for array in capture._kept} == {capture._apart}
    else:
        lasting = capture._apart.args[1]
        assert lasting.used_bytes() >= sum(array.nbytes for array in capture._kept)
        assert lasting not in (graph._small, graph._pool, graph._captured)


def test_a_captured_step_lies_in_one_allocation(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "LEAST", 1 << 14)
    layer = et.nn.Linear(256, 128, rng=0).to("cuda")
    _, train = plain_step(layer)
    batch = et.randn((32, 256), seed=1).to("cuda"), et.asarray([5] * 32).to("cuda")
    for _ in range(3):
        train(*batch)
    (repeated,) = train._graphs.values()
    places, gradient = repeated.graph._placed, layer.weight.grad.data
    if isinstance(gradient, fake.Device):  # numpy has no allocators
        assert places.nbytes == 0
        return
    first = places._arena.ptr
    assert first <= gradient.data.ptr <= first + places.nbytes - gradient.nbytes
    assert places.nbytes == repeated.graph._captured.total_bytes()


def test_what_outlives_a_closed_step_keeps_its_values(gpu: Any) -> None:
    layer, (_, train), batch = small(plain_step)
    for _ in range(4):
        loss = train(*batch)
    kept = [layer.weight.grad, layer.bias.grad, loss]
    before = [array.numpy().copy() for array in kept]
    train.close()
    others = [et.full(array.shape, 7.0, device="cuda") for array in kept for _ in range(8)]
    same([array.numpy() for array in kept], before)
    assert len(others) == 24 and train.nbytes == 0


def test_a_step_that_could_not_be_captured_may_be_mended(gpu: Any) -> None:
    def run(wrap: Wrap) -> Any:
        reads = [True]

        def change(loss: et.ExTensor) -> et.ExTensor:
            if reads:
                float(loss)
            return loss

        layer, (_, train), batch = small(lambda layer: plain_step(layer, change, wrap))
        losses = [float(train(*batch)) for _ in range(2)]
        if wrap is et.capture:
            with pytest.raises(RuntimeError, match="cannot be captured"):
                train(*batch)
        reads.clear()
        losses += [float(train(*batch)) for _ in range(5)]
        return losses, layer.state_dict()

    both(run)


@pytest.mark.parametrize("states", ["float32", "bfloat16", "mxfp8_e4m3"])
def test_what_is_loaded_is_found(gpu: Any, states: str) -> None:
    layer, (by, train), batch = small(lambda layer: plain_step(layer, states=states))
    for _ in range(2):
        train(*batch)
    kept = layer.state_dict(), by.state_dict()
    losses = [float(train(*batch)) for _ in range(3)]
    layer.load_state_dict(kept[0])
    by.load_state_dict(kept[1])
    assert [float(train(*batch)) for _ in range(3)] == losses
    assert by.state_dict()["step.weight"] == 5


def test_memory_that_is_exchanged_is_an_error(gpu: Any) -> None:
    layer, (_, train), batch = small(plain_step)
    for _ in range(3):
        train(*batch)
    layer.weight.data = layer.weight.data.copy()
    with pytest.raises(RuntimeError, match="memory was exchanged.*weight"):
        train(*batch)


def test_random_bits_that_nobody_counts_are_refused(gpu: Any) -> None:
    layer = et.nn.Linear(8, 4, rng=0).to("cuda")

    def step(inputs: et.ExTensor) -> et.ExTensor:
        return layer(inputs).quantize(et.QuantSpec("mxfp4", rounding="stochastic"), seed=1)

    train = et.capture(lambda x: step(x).dequantize())
    with pytest.raises(RuntimeError, match="clock|back from the GPU"):
        for _ in range(3):
            train(et.ones((5, 8), device="cuda"))


def test_other_optimizers_are_refused(gpu: Any) -> None:
    layer = et.nn.Linear(8, 4, rng=0).to("cuda")
    by = RMSprop(layer.named_parameters(), states="bfloat16")

    def step(inputs: et.ExTensor) -> et.ExTensor:
        by.zero_grad()
        loss = layer(inputs).square().mean()
        loss.backward()
        by.step()
        return loss

    train, batch = et.capture(step), et.ones((5, 8), device="cuda")
    train(batch)
    with pytest.raises(ValueError, match="Lion or SGD, got RMSprop"):
        train(batch)


def test_results_are_copies_and_arguments_are_checked(gpu: Any) -> None:
    layer, (_, train), batch = small(plain_step)
    losses = [train(*batch) for _ in range(6)]
    assert len({float(loss) for loss in losses}) == 6
    with pytest.raises(TypeError, match="got none"):
        train()
    with pytest.raises(TypeError, match="without gradients"):
        train(layer.weight, batch[1])
    with pytest.raises(TypeError, match="a tuple of tensors or None, got str"):
        et.capture(lambda x: "loss")(batch[0])


def test_batches_may_be_written_where_the_step_reads_them(gpu: Any) -> None:
    def run(wrap: Wrap) -> Any:
        layer, (_, train), (x, labels) = small(lambda layer: plain_step(layer, wrap=wrap))
        if wrap is et.capture:
            own, _ = train.own(x, labels)
            assert own is not x and train.own(own, labels)[0] is own
            x = own
        losses = []
        for number in range(6):
            x[...] = et.randn((5, 8), seed=number).to("cuda")
            losses.append(float(train(x, labels)))  # labels are copied as ever
        return losses, layer.state_dict()

    both(run)


def test_the_memory_of_all_graphs_is_counted(gpu: Any) -> None:
    _, (_, train), (inputs, labels) = small(plain_step)
    assert train.nbytes == 0
    train(inputs, labels)
    one = train.nbytes
    train(inputs[:2], labels[:2])
    assert one > 0 and train.nbytes == 2 * one


def test_on_the_cpu_a_captured_step_is_the_step() -> None:
    calls = []
    train = et.capture(lambda x: calls.append(1) or x * 2)
    for _ in range(4):
        assert train(et.ones(2, device="cpu")).tolist() == [2.0, 2.0]
    assert len(calls) == 4


def test_a_batch_that_is_copied_to_a_steps_memory_counts_as_a_write(gpu: Any) -> None:
    """A layer that quantized the batch before does not take its blocks for this one's."""
    layer = et.nn.Linear(64, 32, rng=0).to("cuda")
    apply_recipe(layer, "mxfp4", 5)
    fails = iter([False, True])

    def step(x: et.ExTensor) -> et.ExTensor:
        if next(fails, False):
            raise ZeroDivisionError
        return layer(x)

    call = et.capture(step)
    with et.no_grad():
        batches = [et.randn((32, 64), seed=seed).to("cuda") for seed in range(3)]
        expected = [layer(x).numpy() for x in batches]
        same(call(batches[0]).numpy(), expected[0])
        with pytest.raises(ZeroDivisionError):
            call(batches[1])
        same(call(batches[2]).numpy(), expected[2])
