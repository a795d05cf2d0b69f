"""Modules: what they own, their state, and what they refuse."""

import copy
import pickle
import sys

import numpy as np
import pytest

import extensor as et
import extensor.nn as nn
from extensor.autograd.tensor import ExTensor
from extensor.io import load_checkpoint, save_checkpoint
from extensor.quant.array import QuantArray


class Block(nn.Module):
    def __init__(self, rng=None):
        self.name = "a plain attribute"
        self.scale = nn.Parameter(np.ones(3, np.float32))
        self.body = nn.Sequential(nn.Linear(3, 3, rng=rng), nn.ReLU())
        self.count = nn.Buffer(np.zeros((), np.int64))
        self.shift = nn.Parameter(np.zeros(3, np.float32))

    def forward(self, x):
        return self.body(x) * self.scale + self.shift


class Net(nn.Module):
    def __init__(self, rng=0):
        rng = nn.init.as_rng(rng)
        self.blocks = nn.ModuleList([Block(rng), Block(rng)])
        self.head = nn.Linear(3, 2, bias=False, rng=rng)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK = ["scale", "shift", "body.0.weight", "body.0.bias"]
NAMES = [f"blocks.{i}.{name}" for i in (0, 1) for name in BLOCK] + ["head.weight"]


def test_what_a_module_owns():
    net = Net()
    assert [name for name, _ in net.named_parameters()] == NAMES
    assert len(list(net.parameters())) == len(NAMES)
    assert [name for name, _ in net.named_buffers()] == ["blocks.0.count", "blocks.1.count"]
    assert [name for name, _ in net.named_modules()] == [
        "",
        "blocks",
        *(f"blocks.0{rest}" for rest in ("", ".body", ".body.0", ".body.1")),
        *(f"blocks.1{rest}" for rest in ("", ".body", ".body.0", ".body.1")),
        "head",
    ]
    assert all(p.requires_grad for p in net.parameters())
    assert not any(b.requires_grad for b in net.buffers())


def test_an_attribute_set_later_or_anew_or_deleted_counts():
    net = Net()
    net.head = nn.Linear(3, 5, bias=False)
    net.extra = nn.Parameter([1.0])
    assert net.head.weight.shape == (5, 3)
    assert [n for n, _ in net.named_parameters()][-1] == "head.weight"
    assert next(iter(net.named_parameters()))[0] == "extra"
    del net.extra
    net.head = None
    assert [n for n, _ in net.named_parameters()] == NAMES[:-1]


def test_shared_parts_count_once():
    net = Net()
    net.tied = net.head
    net.blocks[1].scale = net.blocks[0].scale
    names = [name for name, _ in net.named_parameters()]
    assert names == [n for n in NAMES if n != "blocks.1.scale"]
    assert "tied" not in [name for name, _ in net.named_modules()]


def test_a_parameter_takes_the_values_of_a_tensor():
    """nn.Parameter(et.randn(...)) as in PyTorch: a copy out of the tensor's graph."""
    x = et.randn((2, 3), seed=0, requires_grad=True)
    assert nn.Parameter(x * 2).node is None
    made = nn.Parameter(x)
    assert made.requires_grad and made.dtype.name == "float32"
    before = made.numpy().copy()
    with et.no_grad():
        x[0, 0] = 100.0
    assert np.array_equal(made.numpy(), before)
    assert nn.Parameter(x, "float64").dtype.name == "float64"
    blocks = et.randn((2, 32), seed=1).to_mxfp4()
    kept = nn.Buffer(blocks)
    assert kept.dtype.name == "mxfp4" and not kept.requires_grad
    assert not np.shares_memory(kept.data.codes, blocks.data.codes)


@pytest.mark.parametrize("wrap", [list, tuple, lambda x: {"a": x[0]}])
@pytest.mark.parametrize("item", [nn.ReLU(), nn.Parameter([1.0]), nn.Buffer([1.0])])
def test_a_plain_container_of_modules_is_refused(wrap, item):
    net = Net()
    with pytest.raises(TypeError, match=r"Net.parts: expected a ModuleList .* would not be found"):
        net.parts = wrap([item])
    net.parts = [1, 2]
    assert not hasattr(Net(), "parts")


@pytest.mark.parametrize("name", ["training", "forward", "parameters", "role"])
def test_names_that_modules_use_are_refused(name):
    with pytest.raises(AttributeError, match=f"Net.{name}: every module has"):
        setattr(Net(), name, nn.ReLU())
    with pytest.raises(AttributeError, match="choose another"):
        nn.Sequential(train=nn.ReLU())


def test_forward_backward_and_zero_grad():
    net = Net()
    x = ExTensor(np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32))
    net(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_a_module_without_forward():
    for module in (nn.Module(), nn.ModuleList()):
        with pytest.raises(TypeError, match=r"defines no forward\(\)"):
            module(1)


def test_train_and_eval_reach_everything():
    net = Net()
    assert net.training and net.eval() is net
    assert not any(m.training for m in net.modules())
    net.blocks[0].train()
    assert net.blocks[0].body.training and not net.blocks[1].training and not net.training
    assert net.train().head.training


def test_seeds_build_the_same_model():
    for one, two in zip(Net(3).parameters(), Net(3).parameters(), strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())
    assert (Net(3).head.weight.numpy() != Net(4).head.weight.numpy()).any()
    net = Net(np.random.default_rng(3))
    np.testing.assert_array_equal(net.head.weight.numpy(), Net(3).head.weight.numpy())
    first, second = (block.body[0].weight.numpy() for block in net.blocks)
    assert (first != second).any()


def test_hooks_see_outputs_until_removed():
    net, seen = Net(), []
    removers = [net.head.register_forward_hook(lambda m, y: seen.append((m, y))) for _ in range(2)]
    x = ExTensor(np.ones((1, 3), np.float32))
    y = net(x)
    assert len(seen) == 2 and seen[0][0] is net.head and seen[0][1] is y
    removers[0]()
    net(x)
    assert len(seen) == 3
    removers[1]()
    net(x)
    assert len(seen) == 3


def test_the_tree():
    assert repr(Block(0)) == (
        "Block(\n  (body): Sequential(\n    (0): Linear(3, 3)\n    (1): ReLU()\n  )\n)"
    )


def test_deepcopy_and_pickle():
    net = Net()
    net.tied = net.head
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.tied is twin.head
        for one, two in zip(net.parameters(), twin.parameters(), strict=True):
            assert one is not two and type(two) is nn.Parameter and two.requires_grad
            np.testing.assert_array_equal(one.numpy(), two.numpy())
            assert not np.shares_memory(one.data, two.data)


def test_moving_to_where_it_is_and_to_what_is_no_device():
    net = Net()
    before = list(net.parameters())
    assert net.to("cpu") is net
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    with pytest.raises(ValueError, match="expected 'cpu' or 'cuda', got 'bfloat16'"):
        net.to("bfloat16")
    assert all(p.data.dtype == np.float32 for p in net.parameters())


# State.


def test_state_round_trip_through_a_file(tmp_path):
    net, other = Net(0), Net(1)
    net.blocks[0].count.copy_(ExTensor(7))
    save_checkpoint(tmp_path / "a", net.state_dict())
    parameters = list(other.parameters())
    other.load_state_dict(load_checkpoint(tmp_path / "a", like=other.state_dict()).tensors)
    assert net.state_dict().keys() == {*NAMES, "blocks.0.count", "blocks.1.count"}
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, other.state_dict()[name])
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
    assert other.blocks[0].count.item() == 7


def test_state_is_copied_both_ways():
    net = Net()
    state = net.state_dict()
    state["head.weight"][:] = 5
    assert (net.head.weight.numpy() != 5).all()
    net.load_state_dict(state)
    assert (net.head.weight.numpy() == 5).all()
    state["head.weight"][:] = 6
    assert (net.head.weight.numpy() == 5).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head.weight": None}, ValueError, "head.weight: expected float32 .* got nothing"),
        ({"more": np.zeros(1)}, ValueError, r"more: expected nothing, got float64 of shape \(1,\)"),
        (
            {"head.weight": np.zeros((3, 2), np.float32)},
            ValueError,
            r"this state for Net does not fit: head.weight: expected float32 of shape \(2, 3\), "
            r"got float32 of shape \(3, 2\)\. Use",
        ),
        ({"head.weight": np.zeros((2, 3))}, ValueError, "got float64"),
        ({"head.weight": [[1.0]]}, TypeError, "head.weight: expected a numpy array or a tensor"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, error, message):
    net = Net(0)
    before = net.state_dict()
    state = {**Net(1).state_dict(), **change}
    with pytest.raises(error, match=message):
        net.load_state_dict({k: v for k, v in state.items() if v is not None})
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_state_is_a_mapping():
    with pytest.raises(TypeError, match=r"expected arrays by path, got NoneType; pass et.load"):
        Net(0).load_state_dict(None)


def test_blocked_buffers_are_part_of_the_state(tmp_path):
    def build(seed):
        net = nn.Sequential(nn.Linear(4, 4))
        values = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)
        net.codebook = nn.Buffer(ExTensor(values).to("mxfp4").data)
        return net

    one, two = build(0), build(1)
    save_checkpoint(tmp_path / "a", one.state_dict())
    state = load_checkpoint(tmp_path / "a").tensors
    assert isinstance(state["codebook"], QuantArray)
    two.load_state_dict(state)
    np.testing.assert_array_equal(two.codebook.to("cpu").codes, one.codebook.to("cpu").codes)
    with pytest.raises(ValueError, match=r"codebook: expected QuantSpec\(format='mxfp4'"):
        two.load_state_dict({**state, "codebook": np.zeros((4, 64), np.float32)})


# Containers.


def test_sequential():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), last=nn.Linear(3, 1))
    assert [name for name, _ in net.named_children()] == ["0", "1", "last"]
    assert len(net) == 3 and net[-1] is net.last and list(net)[1] is net[1]
    assert net(ExTensor(np.ones((5, 2), np.float32))).shape == (5, 1)
    with pytest.raises(TypeError, match="Sequential: 1: expected a Module, got 3"):
        nn.Sequential(nn.ReLU(), 3)
    with pytest.raises(TypeError, match="b: expected a Module"):
        nn.Sequential(nn.ReLU(), b=3)
    with pytest.raises(IndexError):
        net[3]


def test_module_list():
    parts = nn.ModuleList([nn.ReLU()])
    parts.append(nn.Tanh())
    assert len(parts) == 2 and isinstance(parts[1], nn.Tanh)
    assert [name for name, _ in parts.named_children()] == ["0", "1"]
    with pytest.raises(TypeError, match="ModuleList: expected a Module"):
        parts.append("x")


def test_parameters_are_dense_floats():
    assert nn.Parameter([1.0]).dtype.name == "float32"
    assert nn.Parameter([1.0], "bfloat16").dtype.name == "bfloat16"
    with pytest.raises(TypeError, match="floating-point"):
        nn.Parameter([1, 2])


@pytest.mark.parametrize("write", ["load_state_dict", "to"])
def test_backward_notices_that_weights_were_written(write):
    layer = nn.Linear(2, 2, rng=0)
    y = layer(ExTensor(np.ones((1, 2), np.float32), requires_grad=True)).sum()
    getattr(layer, write)(layer.state_dict() if write == "load_state_dict" else "cpu")
    with pytest.raises(RuntimeError, match="written in place"):
        y.backward()


def test_modules_nested_deeply():
    """What walks over modules has no limit; a forward that Python cannot call says so."""
    inner = nn.Linear(3, 2, rng=0)
    model = inner
    for _ in range(500):
        model = nn.Sequential(model)
    x = ExTensor(np.ones((4, 3), np.float32))
    assert len(list(model.modules())) == 501 and list(model.parameters()) == [*inner.parameters()]
    assert list(model.state_dict()) == ["0." * 500 + "weight", "0." * 500 + "bias"]
    model.load_state_dict(model.eval().train().to("cpu").state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not {id(m) for m in copied.modules()} & {id(m) for m in model.modules()}
        assert all(a is not b for a, b in zip(copied.parameters(), model.parameters(), strict=True))
        assert repr(copied) == repr(model)
    whole, part, weight = pickle.loads(pickle.dumps((model, model[0][0], inner.weight), 2))
    assert whole[0][0] is part and next(whole.parameters()) is weight
    lines = repr(model).splitlines()
    assert lines[:2] == ["Sequential(", "  (0): Sequential("]
    assert lines[500] == 1000 * " " + "(0): Linear(3, 2)" and len(lines) == 1001
    with pytest.raises(RecursionError, match="forward: calls are nested more deeply .* limit"):
        model(x)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 2000)
    try:
        model(x).sum().backward()
    finally:
        sys.setrecursionlimit(before)
    np.testing.assert_array_equal(inner.bias.grad.numpy(), [4, 4])


def test_copies_of_modules_with_a_copy_of_their_own():
    class Counted(nn.Linear):
        copies = 0

        def __deepcopy__(self, memo):
            Counted.copies += 1
            return super().__deepcopy__(memo)

    model = nn.Sequential(Counted(2, 2), nn.ReLU())
    model.again = model
    copied = copy.deepcopy(model)
    assert Counted.copies == 1 and copied.again is copied and type(copied[0]) is Counted
    assert copied[0] is not model[0] and copied[0].weight is not model[0].weight
    assert isinstance(copy.deepcopy(model[0]), Counted) and Counted.copies == 2


def test_a_module_that_holds_itself_has_a_repr():
    model = nn.Sequential(nn.ReLU())
    model.again = model
    assert repr(model) == "Sequential(\n  (0): ReLU()\n  (again): ...\n)"
    assert len(list(model.modules())) == 2


def test_lists_nested_deeply_are_refused_in_short():
    deep = 1.0
    for _ in range(2000):
        deep = [deep]
    for call in (
        lambda: ExTensor(deep), lambda: et.ones(deep), lambda: et.ones(2).reshape(deep),
        lambda: et.ones(2).sum(deep), lambda: et.cat(deep), lambda: et.ones(2)[deep],
        lambda: nn.ModuleList(deep), lambda: nn.Sequential(deep),
        lambda: et.QuantSpec.from_dict({"format": deep}),
        lambda: nn.ReLU().load_state_dict({"w": deep}),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["", "a.b", "."])
def test_names_that_paths_cannot_hold_are_refused(name: str) -> None:
    module = nn.Module()
    with pytest.raises(AttributeError, match="expected a name without dots"):
        setattr(module, name, nn.ReLU())


def test_a_graph_from_before_a_load_is_refused() -> None:
    layer = nn.Linear(4, 4, rng=0)
    y = layer(et.ones((2, 4), requires_grad=True)).sum()
    layer.load_state_dict(nn.Linear(4, 4, rng=1).state_dict())
    with pytest.raises(RuntimeError, match="overwritten|written"):
        y.backward()
