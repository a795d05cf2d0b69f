"""When a layer draws new random bits.

Random bits are a function of seed, layer, step and use. The step is the optimizer step, the use is
the number of forward passes since then, as in `extensor.quant.recipe_state`. Both stand in one
int64 buffer of the layer, its clock: step + 2**32 use. A buffer moves with the module, is part of
its state_dict, and is there for a captured CUDA graph to read and to advance.

Activation checkpointing runs a forward pass again in the backward pass. The second run must draw
the bits of the first and leave the clock alone. So the clock's readings are noted by the
checkpointed region that they belong to.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from ctypes import c_int64
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from extensor.torch.layer import LayerHandle, written_by_an_optimizer

__all__ = [
    "STEPS", "Ticking", "advance_with_optimizer", "checkpoint_contexts", "new_clock", "next_step",
    "read_clock",
]  # fmt: skip

_ONE_USE = 1 << 32
STEPS = _ONE_USE - 1
"""The bits of a clock that hold the step."""


def new_clock(step: int, device: torch.device) -> torch.Tensor:
    """A clock at the beginning of a step.

    >>> from extensor.torch.clock import new_clock
    >>> new_clock(3, torch.device("cpu"))
    tensor(3)
    """
    return torch.tensor(step, dtype=torch.int64, device=device)


# --- forward passes ---

_noted: weakref.WeakKeyDictionary[Any, dict[int, list[torch.Tensor | int]]] = (
    weakref.WeakKeyDictionary()
)
"""The readings of each layer in a checkpointed region, which is torch's frame of the region."""
_again: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()
"""How many readings of each layer a second run has taken, by the run's hook."""


def read_clock(
    clock: torch.Tensor | None, layer: LayerHandle, as_number: bool = False
) -> torch.Tensor | int | None:
    """The clock's reading for one forward pass; a recorded pass advances the clock.

    Args:
        clock: the layer's buffer; None where nothing is random.
        layer: the layer.
        as_number: whether a number is read, which waits for a GPU; else a tensor, of its own if the
            pass is recorded.

    >>> import extensor.torch as ext
    >>> from extensor.torch.clock import new_clock, read_clock
    >>> clock, layer = new_clock(3, torch.device("cpu")), ext.Linear(32, 32).quant_layer
    >>> read_clock(clock, layer), clock // 2**32
    (tensor(3), tensor(1))
    """
    if clock is None:
        return None
    if clock.dtype is not torch.int64:  # as Module.type casts all buffers
        raise TypeError(
            f"quant_clock: expected torch.int64, got {clock.dtype}; cast a model by .to(dtype), "
            "which leaves buffers of integers as they are"
        )
    if not torch.is_grad_enabled():
        return int(clock) if as_number else clock
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.extensor.read_clock(clock, layer.number)
        return compiled
    return _next_reading(clock, layer.number, as_number)


def _next_reading(clock: torch.Tensor, layer: int, as_number: bool) -> torch.Tensor | int:
    """A reading that advances the clock, or in a region's second run that of the first."""
    first_runs = []  # of this region and those around it
    for hook, region, second in _regions():
        if second and region in _noted:
            reading = _noted_reading(hook, region, layer)
            break
        first_runs.append(region)
    else:
        reading = _new_reading(clock, as_number)
    for region in first_runs:
        _noted.setdefault(region, defaultdict(list))[layer].append(reading)
    return reading


def _new_reading(clock: torch.Tensor, as_number: bool) -> torch.Tensor | int:
    reading: torch.Tensor | int
    if as_number and clock.is_cpu:
        number = c_int64.from_address(clock.data_ptr())  # a tenth of what torch takes to add
        reading = number.value
        number.value = reading + _ONE_USE
    else:
        reading = int(clock) if as_number else clock.clone()
        clock += _ONE_USE
    return reading


@torch.library.custom_op("extensor::read_clock", mutates_args=("clock",))
def _read_clock(clock: torch.Tensor, layer: int) -> torch.Tensor:
    """The reading of a compiled pass.

    Compilers recompute a clone in the backward pass, from a clock that has advanced by then. The
    result of an operator that they cannot see into is kept.
    """
    if clock.is_cuda and torch.cuda.is_current_stream_capturing() and _regions():
        raise RuntimeError(
            "extensor.torch: a compiled layer with stochastic rounding is captured in a graph "
            "within a checkpointed region, whose second run would draw other random bits; compile "
            "the model with its regions, which take context_fn=extensor.torch.checkpoint_contexts"
        )
    reading = _next_reading(clock, layer, as_number=clock.is_cpu)
    # A compiler may write over what it is given.
    return reading.clone() if isinstance(reading, torch.Tensor) else clock.new_full((), reading)


@_read_clock.register_fake
def _fake_reading(clock: torch.Tensor, layer: int) -> torch.Tensor:
    if "recompute" in torch.fx.traceback.get_current_meta() and not _kept.regions:
        raise RuntimeError(
            "extensor.torch: a layer with stochastic rounding is in a checkpointed region of a "
            "compiled model, whose second run would draw other random bits; expected "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, "
            "context_fn=extensor.torch.checkpoint_contexts), or a recipe that rounds to nearest"
        )
    return torch.empty_like(clock)


class _Kept(threading.local):
    regions = 0


_kept = _Kept()
"""How many regions are being traced that keep their readings."""


def checkpoint_contexts() -> tuple[Any, Any]:
    """What `torch.utils.checkpoint` takes as ``context_fn`` in a compiled model.

    A region then keeps each layer's reading of its clock, 8 bytes, so that its second run draws the
    random bits of the first. Regions of a model that is not compiled need no contexts.

    Returns:
        Two contexts: for the first run, and for the second.

    >>> import extensor.torch as ext
    >>> from torch.utils.checkpoint import checkpoint
    >>> model = torch.compile(ext.Linear(32, 32, recipe="mxfp4_all"), backend="eager")
    >>> kept = {"use_reentrant": False, "context_fn": ext.checkpoint_contexts}
    >>> checkpoint(model, torch.ones(4, 32), **kept).shape
    torch.Size([4, 32])
    """
    contexts: Any = create_selective_checkpoint_contexts
    first, second = contexts([torch.ops.extensor.read_clock.default])
    kind: Any = type(first)
    first.__class__ = _keeping(kind)  # compilers take no other kind of context than torch's own
    return first, second


@cache
def _keeping(mode: Any) -> Any:
    """A kind of context that notes that it keeps readings."""

    class Keeping(mode):  # type: ignore[misc]
        def __enter__(self) -> Any:
            _kept.regions += 1
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            _kept.regions -= 1
            return super().__exit__(*error)

    return Keeping


def _noted_reading(hook: Any, region: Any, layer: int) -> torch.Tensor | int:
    taken = _again.setdefault(hook, Counter())
    at = taken[layer]
    taken[layer] += 1
    return _noted[region][layer][at]


def _regions() -> list[tuple[Any, Any, bool]]:
    """The checkpointed regions under way, the innermost first.

    Of each the hook, torch's frame of it, and whether this is its second run. torch has no public
    name for them. Both runs have hooks on saved tensors, whose closures hold the frame, a second
    run's weakly. torch shows the top of the hooks alone, so they are taken off and put back.
    """
    stack: Any = torch._C._autograd
    taken: list[Any] = []
    try:
        while hooks := stack._top_saved_tensors_default_hooks(True):
            taken.append(hooks)
            stack._pop_saved_tensors_default_hooks()
    finally:
        for hooks in reversed(taken):
            stack._push_saved_tensors_default_hooks(*hooks)
    found = []
    for pack in (inspect.unwrap(hooks[0]) for hooks in taken):
        for cell in getattr(pack, "__closure__", None) or ():
            held: Any = cell.cell_contents
            second = isinstance(held, weakref.ref)
            frame = held() if second else held
            if type(frame).__name__ == "_CheckpointFrame":
                found.append((pack, frame, second))
    return found


# --- optimizer steps ---


class Ticking:
    """What `next_step` advances: a module with a clock and parameters."""

    quant_clock: torch.Tensor | None
    quant_layer: LayerHandle | None
    parameters: Callable[[], Iterable[torch.nn.Parameter]]


_modules: weakref.WeakSet[Ticking] = weakref.WeakSet()
_of_optimizer: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[weakref.ref[Ticking]]]] = (
    weakref.WeakKeyDictionary()
)
_registered = [0]
"""How many modules have been."""


def advance_with_optimizer(module: Ticking) -> None:
    """Let each step of the optimizer that has the module's weight begin the clock's next."""
    _modules.add(module)
    _registered[0] += 1


def next_step(modules: Iterable[Ticking]) -> None:
    """Begin the next step of these modules' clocks.

    >>> import extensor.torch as ext
    >>> layer = ext.Linear(32, 32, recipe="mxfp4_all")
    >>> _ = layer(torch.ones(1, 32))
    >>> from extensor.torch.clock import next_step
    >>> next_step([layer])
    >>> layer.quant_clock
    tensor(1)
    """
    clocks = [m.quant_clock for m in modules if m.quant_clock is not None]
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for clock in clocks:
        by_device[clock.device].append(clock)
    for there in by_device.values():
        times = torch.stack(there)
        times &= STEPS
        times += 1
        torch._foreach_copy_(there, list(times.unbind()))


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _leading(module: Ticking) -> torch.nn.Parameter | None:
    """The parameter whose optimizer advances the clock: others may have optimizers of their own."""
    parameters = list(module.parameters())
    return next((p for p in parameters if p.requires_grad), next(iter(parameters), None))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    written_by_an_optimizer()
    key = _registered[0], *(len(group["params"]) for group in optimizer.param_groups)
    found = _of_optimizer.get(optimizer)
    if found is None or found[0] != key:
        own = _parameters(optimizer)
        for inner in vars(optimizer).values():  # as of ZeroRedundancyOptimizer: it steps, too
            if isinstance(inner, Optimizer):
                own -= _parameters(inner)
        its = [m for m in _modules if id(_leading(m)) in own]
        found = _of_optimizer[optimizer] = key, [weakref.ref(m) for m in its]
    modules = [module for module in (ref() for ref in found[1]) if module is not None]
    for module in modules:
        if module.quant_layer is not None:
            module.quant_layer.forget_weight()
    with torch.no_grad():
        next_step(modules)


register_optimizer_step_post_hook(_after_step)
