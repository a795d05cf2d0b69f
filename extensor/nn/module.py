"""Module: the base class of layers and models.

A module owns its attributes that are a `Parameter`, a `Buffer` or a `Module`, by name and in the
order they were set. Nothing needs to be registered, and no base initializer needs to run. A plain
list of layers, whose parameters would not be found, is refused when it is set.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from extensor.autograd.checkpoint import checkpoint
from extensor.autograd.mode import MODE, Storage
from extensor.nn.display import html_of, repr_of
from extensor.nn.parameter import Buffer, Parameter
from extensor.nn.state import StateNames, load_state, state_of
from extensor.quant.array import QuantArray
from extensor.torch_names import attribute_error

__all__ = ["Hook", "Module", "PreHook", "StateNames", "evaluating"]

Self = TypeVar("Self", bound="Module")
Hook = Callable[["Module", Any], None]
"""Called with (module, output) after each forward."""
PreHook = Callable[["Module", tuple[Any, ...]], None]
"""Called with (module, positional arguments) before each forward."""


class Module:
    """Base class of layers and models: subclasses set attributes and define ``forward``.

    Attributes:
        training: whether layers that differ, such as Dropout, act as in training.
        role: ``"embedding"`` or ``"head"``, by which rules of recipes match the layer; else None.
        feeds_layers: names of the module's norms whose results only layers with GEMMs read. A
            recipe with bfloat16 activations rounds these results.
        reads_weights: names of parts whose parameters forward reads without calling the parts:
            where ranks share a model, its parameters are gathered for that (`GatheredBuckets`).
        storage: how what its operations keep for backward is stored, by `Recipe.saved`; else None.
        recomputed: whether its forward is a `checkpoint`: run again in backward. "cheap": what its
            operations can make from what they keep, without a product, is made again alone.

    >>> class Double(et.nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x
    >>> Double()(et.ones((2,))).tolist()
    [2.0, 2.0]
    """

    training: bool = True
    role: str | None = None
    feeds_layers: tuple[str, ...] = ()
    reads_weights: tuple[str, ...] = ()
    storage: Storage | None = None
    recomputed: bool | Literal["cheap"] = False
    _hooks: tuple[Hook, ...] = ()
    _pre_hooks: tuple[PreHook, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output; subclasses define it, and callers call the module itself.

        Args:
            *args: what the subclass takes.
            **kwargs: likewise.

        Returns:
            What the subclass gives.

        Raises:
            TypeError: in a class that defines no ``forward``.

        >>> et.nn.ReLU().forward(et.ExTensor([-1.0, 2.0])).tolist()
        [0.0, 2.0]
        """
        raise TypeError(f"{type(self).__name__} defines no forward(); it cannot be called")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hooks before, `forward`, and the hooks after it."""
        for before in self._pre_hooks:
            before(self, args)
        try:
            if self.storage is None and not self.recomputed:
                output = self.forward(*args, **kwargs)
            else:
                output = self._forward_saving(args, kwargs)
        except RecursionError as error:
            raise _too_deep(error) from None
        for hook in self._hooks:
            hook(self, output)
        return output

    def _forward_saving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward`, where what it keeps for backward is stored in blocks, or computed again."""
        before = MODE.storage, MODE.saves_again
        if self.storage is not None:
            MODE.storage = self.storage
        MODE.saves_again |= self.recomputed == "cheap"
        try:
            if self.recomputed is True:
                return checkpoint(partial(self.forward, **kwargs), *args)
            return self.forward(*args, **kwargs)
        finally:
            MODE.storage, MODE.saves_again = before

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (Module, Parameter, Buffer)):
            if hasattr(Module, name):
                raise AttributeError(
                    f"{type(self).__name__}.{name}: every module has an attribute of that name; "
                    "choose another"
                )
            if not name or "." in name:
                raise AttributeError(
                    f"{type(self).__name__}.{name}: expected a name without dots, got {name!r}: in "
                    "paths they separate a module from its parts, so two could be of one name"
                )
        elif value is not None and isinstance(vars(self).get(name), (Module, Parameter, Buffer)):
            raise TypeError(
                f"{type(self).__name__}.{name}: expected a Parameter, Buffer or Module in place of "
                f"one, got {type(value).__name__}; make one with nn.Parameter(...), or write the "
                "values with copy_"
            )
        if isinstance(value, (list, tuple, dict, set)):
            items = value.values() if isinstance(value, dict) else value
            if any(isinstance(item, (Module, Parameter, Buffer)) for item in items):
                raise TypeError(
                    f"{type(self).__name__}.{name}: expected a ModuleList or Sequential, got "
                    f"a plain {type(value).__name__}, whose parameters would not be found"
                )
        object.__setattr__(self, name, value)

    if not TYPE_CHECKING:  # to a type checker, a name that does not exist stays an error

        def __getattr__(self, name):  # only for what the module does not have
            raise attribute_error("Module", self, name)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        # All exist before any is filled: no recursion, since modules may be nested deeply.
        fresh = [
            m for m in self.modules()
            if m is self or (id(m) not in memo and type(m).__deepcopy__ is Module.__deepcopy__)
        ]  # fmt: skip
        memo |= {id(m): object.__new__(type(m)) for m in fresh}
        for module in fresh:
            vars(memo[id(module)]).update(copy.deepcopy(vars(module), memo))
        made: Self = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle recurses. It is given those of every hundredth level first, the lowest before all,
        # and knows them when it comes to what holds them.
        made = super().__reduce_ex__(protocol)
        levels, seen = [{id(self): self}], {id(self)}
        while levels[-1]:
            children = (m for above in levels[-1].values() for _, m in above.named_children())
            levels.append({id(m): m for m in children if id(m) not in seen})
            seen |= levels[-1].keys()
        below = [module for level in reversed(levels[100::100]) for module in level.values()]
        return (_made_after, (below, *made[:2]), *made[2:]) if below else made

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules that are attributes, in the order they were set.

        Returns:
            An iterator of (name, module).

        >>> model = et.nn.Sequential(et.nn.Linear(4, 2), et.nn.ReLU())
        >>> [name for name, _ in model.named_children()]
        ['0', '1']
        """
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """This module, at path ``""``, and all below it; shared ones once.

        Returns:
            An iterator of (path, module).

        >>> model = et.nn.Sequential(body=et.nn.Sequential(et.nn.ReLU()))
        >>> [path for path, _ in model.named_modules()]
        ['', 'body', 'body.0']
        """
        seen: set[int] = set()
        left: list[tuple[str, Module]] = [("", self)]  # no recursion: modules may be nested deeply
        while left:
            path, module = left.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield path, module
            start = f"{path}." if path else ""
            children = [(start + name, child) for name, child in module.named_children()]
            left += reversed(children)

    def modules(self) -> Iterator[Module]:
        """This module and all below it; shared ones once.

        Returns:
            An iterator of modules, this one first.

        >>> len(list(et.nn.Sequential(et.nn.ReLU(), et.nn.Tanh()).modules()))
        3
        """
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters here and below; shared ones once.

        Returns:
            An iterator of (path, parameter).

        >>> model = et.nn.Sequential(et.nn.Linear(4, 2))
        >>> [(path, p.shape) for path, p in model.named_parameters()]
        [('0.weight', (2, 4)), ('0.bias', (2,))]
        """
        for path, tensor in self._named_tensors():
            if isinstance(tensor, Parameter):
                yield path, tensor

    def parameters(self) -> Iterator[Parameter]:
        """All parameters here and below; shared ones once.

        Returns:
            An iterator of parameters, which optimizers take.

        >>> sum(p.size for p in et.nn.Linear(4, 2).parameters())
        10
        """
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """All buffers here and below; shared ones once.

        Returns:
            An iterator of (path, buffer).

        >>> [path for path, _ in et.nn.BatchNorm2d(8).named_buffers()]
        ['running_mean', 'running_var']
        """
        for path, tensor in self._named_tensors():
            if isinstance(tensor, Buffer):
                yield path, tensor

    def buffers(self) -> Iterator[Buffer]:
        """All buffers here and below; shared ones once.

        Returns:
            An iterator of buffers.

        >>> [b.shape for b in et.nn.BatchNorm2d(8).buffers()]
        [(8,), (8,)]
        """
        return (buffer for _, buffer in self.named_buffers())

    def _named_tensors(self) -> Iterator[tuple[str, Parameter | Buffer]]:
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, (Parameter, Buffer)) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{path}.{name}" if path else name, value

    def train(self: Self, mode: bool = True) -> Self:
        """Set ``training`` here and below.

        Args:
            mode: False for evaluation.

        Returns:
            The module itself.

        >>> et.nn.Dropout().train(False).training
        False
        """
        for module in self.modules():
            module.training = bool(mode)
        return self

    def eval(self: Self) -> Self:
        """Set evaluation mode here and below: ``train(False)``.

        Returns:
            The module itself.

        >>> et.nn.Dropout().eval()(et.ones((2,))).tolist()
        [1.0, 1.0]
        """
        return self.train(False)

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None.

        >>> layer = et.nn.Linear(2, 1)
        >>> layer(et.ones((1, 2))).sum().backward()
        >>> layer.zero_grad()
        >>> layer.weight.grad is None
        True
        """
        for parameter in self.parameters():
            parameter.grad = None

    def to(self: Self, device: str) -> Self:
        """Move parameters and buffers to a device, in place; gradients become None.

        Make optimizers after the move: their state is on the parameters' device.

        Args:
            device: ``"cpu"`` or ``"cuda"``.

        Returns:
            The module itself.

        Raises:
            RuntimeError: if the device is not available; nothing is moved then.
            ValueError: for what is no device.

        >>> et.nn.Linear(2, 1).to("cpu").weight.device
        'cpu'
        """
        tensors = [tensor for _, tensor in self._named_tensors()]
        moved = [tensor.to(device) for tensor in tensors]
        if any(new.device != device for new in moved):
            raise ValueError(f"device: expected 'cpu' or 'cuda', got {device!r}")
        for tensor, new in zip(tensors, moved, strict=True):
            tensor.data, tensor.backend, tensor.grad = new.data, new.backend, None
            tensor._version[0] += 1
        return self

    def cpu(self: Self) -> Self:
        """Move parameters and buffers to the CPU, in place: ``to("cpu")``.

        Returns:
            The module itself.

        >>> et.nn.Linear(2, 1).cpu().weight.device
        'cpu'
        """
        return self.to("cpu")

    def cuda(self: Self) -> Self:
        """Move parameters and buffers to the GPU, in place: ``to("cuda")``.

        Returns:
            The module itself.

        Raises:
            RuntimeError: if there is no GPU; nothing is moved then.

        >>> et.nn.Linear(2, 1).cuda().weight.device    # doctest: +SKIP
        'cuda'
        """
        return self.to("cuda")

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Set whether the parameters here and below collect gradients.

        Args:
            requires_grad: False freezes them; make optimizers of the others.

        Returns:
            The module itself.

        >>> layer = et.nn.Linear(2, 1).requires_grad_(False)
        >>> layer(et.ones((1, 2))).requires_grad
        False
        """
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def register_forward_hook(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook(module, output)`` after each forward.

        Args:
            hook: what it returns is ignored.

        Returns:
            A function that removes the hook.

        Raises:
            TypeError: for what cannot be called.

        >>> layer = et.nn.Linear(2, 3)
        >>> remove = layer.register_forward_hook(lambda module, output: print(output.shape))
        >>> y = layer(et.ones((1, 2)))
        (1, 3)
        >>> remove()
        """
        return self._register("_hooks", hook)

    def register_forward_pre_hook(self, hook: PreHook) -> Callable[[], None]:
        """Call ``hook(module, args)`` before each forward.

        Args:
            hook: gets the positional arguments as a tuple; what it returns is ignored.

        Returns:
            A function that removes the hook.

        Raises:
            TypeError: for what cannot be called.

        >>> layer = et.nn.Linear(2, 3)
        >>> remove = layer.register_forward_pre_hook(lambda module, args: print(args[0].shape))
        >>> y = layer(et.ones((1, 2)))
        (1, 2)
        """
        return self._register("_pre_hooks", hook)

    def _register(self, kind: str, hook: Any) -> Callable[[], None]:
        if not callable(hook):
            raise TypeError(f"hook: expected a function of a module and a value, got {hook!r:.80}")
        setattr(self, kind, (*getattr(self, kind), hook))

        def remove() -> None:
            left = list(getattr(self, kind))
            left.remove(hook)
            setattr(self, kind, tuple(left))

        return remove

    def state_dict(self) -> dict[str, np.ndarray[Any, Any] | QuantArray]:
        """Copies of every parameter and buffer, for a checkpoint.

        Returns:
            Numpy arrays on the host by path; a `QuantArray` where the tensor is blocked.

        >>> {path: a.shape for path, a in et.nn.Linear(4, 2).state_dict().items()}
        {'weight': (2, 4), 'bias': (2,)}
        """
        return state_of(self._named_tensors())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> StateNames:
        """Load parameters and buffers that `state_dict` returned.

        Args:
            state: arrays or tensors by path, of this module's shapes and dtypes.
            strict: whether the names must be exactly this module's. False loads those that both
                have, and the result says which were left out.

        Returns:
            The names that only one of the two has; none of either if ``strict``.

        Raises:
            ValueError: if names, shapes or dtypes differ; every difference is named (the first
                eight, and how many more), and nothing is changed. If they have no name in common.
            TypeError: if it is no mapping, or a value is no array.

        >>> one, other = et.nn.Linear(4, 2, rng=0), et.nn.Linear(4, 2, bias=False)
        >>> other.load_state_dict(one.state_dict(), strict=False)
        StateNames(missing_keys=[], unexpected_keys=['bias'])
        >>> bool((one.weight == other.weight).all())
        True
        """
        return load_state(type(self).__name__, dict(self._named_tensors()), state, strict)

    def extra_repr(self) -> str:
        """The options shown in the module's line of the tree; subclasses override it.

        Returns:
            Text without a line break; empty in the base class.

        >>> et.nn.Linear(4, 2).extra_repr()
        '4, 2'
        """
        return ""

    def _repr_html_(self) -> str:
        return html_of(self)

    def __repr__(self) -> str:
        return repr_of(self, Module.__repr__)


def _made_after(below: Any, make: Any, arguments: Any) -> Any:
    """What pickle makes of a module that holds those ``below``."""
    return make(*arguments)


def _too_deep(error: RecursionError) -> RecursionError:
    """The error of a forward that calls more deeply than Python allows; the innermost is kept."""
    if "setrecursionlimit" in str(error):
        return error
    return RecursionError(
        "a module's forward: calls are nested more deeply than Python's limit of "
        f"{sys.getrecursionlimit()}, as by modules in modules, each two or more; nest them "
        "less, or allow more with sys.setrecursionlimit"
    )


@contextlib.contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode within a ``with`` block; each module gets its own mode back.

    Args:
        model: the module that is set, with all below it.

    >>> from extensor.nn.module import evaluating
    >>> layer = et.nn.Dropout()
    >>> with evaluating(layer):
    ...     print(layer.training)
    False
    >>> layer.training
    True
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
