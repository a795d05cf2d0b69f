"""LSTM and GRU: against torch step by step, derivatives, recipes, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from extensor import ExTensor, nn
from extensor.optim import SGD
from extensor.testing import gradcheck, gradgradcheck

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2, "batch_first": True},
    "both ways": {"bidirectional": True},
    "all": {"num_layers": 3, "bidirectional": True, "batch_first": True},
}


def tensor(shape: tuple[int, ...], seed: int, **options: Any) -> ExTensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return ExTensor(values, **options)


def torch_order(layer: Any) -> list[Any]:
    """Our parameters in the order of torch's: weights, then biases, of each cell."""
    order = []
    for cell in layer.cells:
        order += [cell.input.weight, cell.hidden.weight]
        order += [] if cell.input.bias is None else [cell.input.bias, cell.hidden.bias]
    return order


def in_float64(layer: Any) -> Any:
    """The layer with its weights in float64, so that nothing but a mistake can differ."""
    for p in layer.parameters():
        p.data = p.data.astype(np.float64)
        p.dtype = ExTensor(p.data).dtype
    return layer


def states_of(last: Any) -> list[Any]:
    return list(last) if isinstance(last, tuple) else [last]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("given", [False, True])
def test_twenty_steps_as_torch(name: str, options: dict[str, Any], given: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    mine = in_float64(getattr(nn, name)(5, 4, rng=0, **options))
    theirs = getattr(torch.nn, name)(5, 4, **options).double()
    pairs = list(zip(torch_order(mine), theirs.parameters(), strict=True))
    with torch.no_grad():
        for p, q in pairs:
            q.copy_(torch.tensor(p.numpy()))
    ours = SGD(list(mine.parameters()), lr=0.1)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    rng = np.random.default_rng(0)
    shape = (mine.num_layers * mine.directions, 3, 4)

    def same(a: ExTensor, b: Any) -> None:
        # rounding of 1e-16 grows to 1e-10 in twenty steps of a recurrence; mistakes are larger
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-8, atol=1e-9)

    for _ in range(20):
        values = rng.standard_normal((3, 6, 5) if mine.batch_first else (6, 3, 5))
        x, z = ExTensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
        first = [rng.standard_normal(shape) for _ in range(mine.states)]
        start, begin = (
            [kind(s) for s in first] if given else [] for kind in (ExTensor, torch.tensor)
        )
        out, last = mine(x, *([tuple(start)] if len(start) > 1 else start))
        expected, end = theirs(z, *([tuple(begin)] if len(begin) > 1 else begin))
        same(out, expected)
        for a, b in zip(states_of(last), states_of(end), strict=True):
            same(a, b)
        mine.zero_grad()
        theirs.zero_grad()
        # every output and every last state has a part in the loss
        (out.square().sum() + sum((s * 0.5).sum() for s in states_of(last))).backward()
        (expected.square().sum() + sum((s * 0.5).sum() for s in states_of(end))).backward()
        same(x.grad, z.grad)
        ours.step()
        reference.step()
        for p, q in pairs:
            same(p, q)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_first_and_second_derivatives(name: str) -> None:
    layer = in_float64(getattr(nn, name)(2, 3, num_layers=2, bidirectional=True, rng=1))
    x = ExTensor(np.random.default_rng(0).standard_normal((3, 2, 2)))

    def f(x: ExTensor) -> ExTensor:
        return layer(x)[0]

    gradcheck(f, (x,))
    gradgradcheck(f, (x,))


def test_state_carries_on_where_a_sequence_was_cut() -> None:
    for layer in (nn.LSTM(4, 3, num_layers=2, rng=0), nn.GRU(4, 3, num_layers=2, rng=0)):
        x = tensor((7, 2, 4), 0)
        whole, last = layer(x)
        one, state = layer(x[:3])
        two, end = layer(x[3:], state)
        joined = np.concatenate([one.numpy(), two.numpy()])
        np.testing.assert_allclose(joined, whole.numpy(), rtol=1e-5, atol=1e-6)
        pairs = zip(last, end, strict=True) if isinstance(layer, nn.LSTM) else [(last, end)]
        for a, b in pairs:
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_dropout_acts_between_layers_in_training_only() -> None:
    layer = nn.LSTM(4, 3, num_layers=2, dropout=0.5, rng=0)
    x = tensor((5, 2, 4), 0)
    assert not np.array_equal(layer(x)[0].numpy(), layer(x)[0].numpy())
    layer.eval()
    assert np.array_equal(layer(x)[0].numpy(), layer(x)[0].numpy())


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_dropout_drops_no_input(name: str) -> None:
    """Two layers in training are two of one layer, with the layer's dropout between them alone."""
    both = getattr(nn, name)(4, 4, num_layers=2, dropout=0.5, rng=0)
    drop = nn.Dropout(0.5)
    drop.draws.assign_(both.dropout.draws.numpy())
    x = tensor((5, 2, 4), 0)
    expected = x
    for cell in both.cells:
        one = getattr(nn, name)(4, 4, rng=0)
        one.load_state_dict({f"cells.0.{k}": v for k, v in cell.state_dict().items()})
        expected = one(expected if cell is both.cells[0] else drop(expected))[0]
    np.testing.assert_array_equal(both(x)[0].numpy(), expected.numpy())


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_cells_draw_weights_of_their_own(name: str) -> None:
    layer = getattr(nn, name)(4, 4, num_layers=2, bidirectional=True, dropout=0.5, rng=0)
    drawn = [p.numpy().ravel()[:16].tobytes() for p in layer.parameters()]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_a_recipe_quantizes_every_product(name: str) -> None:
    layer = getattr(nn, name)(32, 32, num_layers=2, rng=0)
    x = tensor((4, 3, 32), 0, requires_grad=True)
    plain = layer(x)[0].numpy()
    state = nn.apply_recipe(layer, "mxfp4_all")
    out = layer(x)[0]
    assert 0 < np.abs(out.numpy() - plain).max() < 0.3
    out.square().sum().backward()
    assert all(np.isfinite(p.grad.numpy()).all() for p in layer.parameters())
    seen = {path for path, _ in state.telemetry}
    assert seen == {f"cells.{c}.{part}" for c in (0, 1) for part in ("input", "hidden")}
    # four steps of hidden, one of input: (B, H) against (T B, I)
    assert state.telemetry["cells.0.hidden", "fprop.x"].count == 4 * 3 * 32


def test_every_step_has_random_bits_of_its_own() -> None:
    layer = nn.LSTM(4, 4, rng=0)
    context = nn.apply_recipe(layer, "mxfp4_all").layers["cells.0.hidden"]
    uses = [context.next_use() for _ in range(64)]
    assert len({use.stream("dgrad.g", False).counter_high for use in uses}) == 64
    assert uses[0] is context and uses[5].layer is context.layer


def test_bad_input() -> None:
    lstm, gru = nn.LSTM(4, 3), nn.GRU(4, 3, batch_first=True)
    x = tensor((5, 2, 4), 0)
    for layer, bad, error, message in (
        (
            lstm,
            tensor((5, 4), 0),
            ValueError,
            r"expected an input of shape \(T, B, 4\), got \(5, 4\)",
        ),
        (gru, tensor((5, 2, 3), 0), ValueError, r"expected an input of shape \(B, T, 4\)"),
        (lstm, tensor((0, 2, 4), 0), ValueError, "a sequence of one step or more"),
        (gru, tensor((2, 0, 4), 0), ValueError, "a sequence of one step or more"),
        (lstm, [[1.0]], TypeError, "LSTM: .*an ExTensor, got list"),
    ):
        with pytest.raises(error, match=message):
            layer(bad)
    state = tensor((1, 2, 3), 0)
    for bad_state in ((state,), (state, tensor((1, 3, 3), 0)), (state, state, state)):
        with pytest.raises(ValueError, match=r"expected 2 first state\(s\) of shape \(1, 2, 3\)"):
            lstm(x, bad_state)
    with pytest.raises(TypeError, match="LSTM: .*an ExTensor, got NoneType"):
        lstm(x, (state, None))
    with pytest.raises(ValueError, match="it acts between layers only"):
        nn.LSTM(4, 3, dropout=0.5)
    with pytest.raises(ValueError, match="hidden_size: expected 1 or more"):
        nn.GRU(4, 0)
    empty = lstm(tensor((5, 0, 4), 0))[0]
    assert empty.shape == (5, 0, 3)


def test_repr_says_what_is_not_the_default():
    assert nn.LSTM(2, 3).extra_repr() == "2, 3"
    full = nn.GRU(2, 3, num_layers=2, batch_first=True, bidirectional=True)
    assert full.extra_repr() == "2, 3, num_layers=2, batch_first=True, bidirectional=True"
