"""How a module shows itself: as a tree of layers in text, and as a table in notebooks."""

from __future__ import annotations

from typing import Any

from extensor.autograd.tensor import ExTensor
from extensor.notebook import card, table
from extensor.quant.recipe import operand_text

__all__ = ["html_of", "repr_of"]

MOST_ROWS = 100
"""A notebook shows so many layers of a model."""


def html_of(root: Any) -> str:
    """A table of a model's layers, for notebooks."""
    owned: dict[str, list[tuple[str, ExTensor]]] = {}
    for path, tensor in root._named_tensors():
        owner, _, name = path.rpartition(".")
        owned.setdefault(owner, []).append((name, tensor))
    modules, rows = dict(root.named_modules()), []
    for path, tensors in list(owned.items())[:MOST_ROWS]:
        module, context = modules[path], getattr(modules[path], "quant", None)
        rows.append(
            (
                path or "(itself)",
                f"{type(module).__name__}({module.extra_repr()})",
                ", ".join(f"{n} {t.shape} {t.dtype.name}" for n, t in tensors),
                f"{sum(t.nbytes for _, t in tensors):,}",
                operand_text(context.operand("fprop.w")) if context is not None else "",
            )
        )
    counts = {id(p): (p.size, p.nbytes) for p in root.parameters()}.values()
    facts = [
        ("parameters", f"{sum(size for size, _ in counts):,}"),
        ("bytes", f"{sum(nbytes for _, nbytes in counts):,}"),
        ("mode", "training" if root.training else "evaluation"),
    ]
    columns = ("layer", "kind", "tensors", "bytes", "weights multiplied as")
    hidden = len(owned) - len(rows)
    note = f"and {hidden} more layers" if hidden else ""
    return card(type(root).__name__, facts, table(columns, rows, note))


def repr_of(root: Any, plain: Any) -> str:
    """The tree of a model's layers, one to a line.

    Args:
        root: the module.
        plain: the ``__repr__`` of the base class; a module with another is shown by its own.
    """
    lines: list[str] = []
    left: list[tuple[str, str, Any]] = [("", "", root)]  # no recursion
    around: list[Any] = []
    while left:
        indent, label, module = left.pop()
        if module is None:
            lines.append(f"{indent})")
            around.pop()
        elif any(module is outer for outer in around):
            lines.append(f"{indent}{label}...")  # it holds itself
        elif module is not root and type(module).__repr__ is not plain:
            lines.append(indent + label + repr(module).replace("\n", f"\n{indent}"))
        else:
            children = list(module.named_children())
            end = "" if children else ")"
            lines.append(f"{indent}{label}{type(module).__name__}({module.extra_repr()}{end}")
            if children:
                around.append(module)
                left.append((indent, "", None))
            left += [(f"{indent}  ", f"({name}): ", m) for name, m in reversed(children)]
    return "\n".join(lines)
