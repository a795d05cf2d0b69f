"""Einstein summation, written in transposes, products and sums."""

from __future__ import annotations

import math

import numpy as np

from extensor.autograd.primitive import BadInput, Sample, composite
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import tensors_only

__all__ = ["einsum"]


def _parse(equation: str, tensors: tuple[ExTensor, ...]) -> tuple[list[str], str]:
    if not isinstance(equation, str):
        raise TypeError(f"einsum: expected an equation like 'ij,jk->ik', got {equation!r}")
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if not all(c.isalpha() for c in "".join(terms) + right):
        raise ValueError(
            f"einsum: expected letters, ',' and '->', got {equation!r}; write '...' out as letters"
        )
    if not arrow:  # the implicit form: letters that occur once, in alphabetical order
        letters = "".join(terms)
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if len(terms) != len(tensors) or any(
        len(term) != t.ndim for term, t in zip(terms, tensors, strict=False)
    ):
        raise ValueError(
            f"einsum: expected one letter for each axis, got {equation!r} for shapes "
            f"{', '.join(str(t.shape) for t in tensors)}"
        )
    if any(len(set(term)) < len(term) for term in [*terms, right]) or set(right) - set(
        "".join(terms)
    ):
        raise ValueError(
            f"einsum: expected each letter once per term and results from the terms, got "
            f"{equation!r}"
        )
    return terms, right


@composite(
    samples=lambda rng: [
        Sample(("ij,jk->ik", rng.normal(size=(2, 3)), rng.normal(size=(3, 4)))),
        Sample(("bij,bkj->bki", rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 2, 4)))),
        Sample(("ij->j", rng.normal(size=(2, 3)))),
        Sample(("i,j,ij", rng.normal(size=(2,)), rng.normal(size=(3,)), rng.normal(size=(2, 3)))),
    ],
    errors=(
        BadInput(("ij,jk->ik", np.zeros((2, 3)), np.zeros((4, 5))), ValueError, "one length for"),
        BadInput(("ij->ij", np.zeros(3)), ValueError, "one letter for each axis"),
        BadInput(("ii->i", np.zeros((3, 3))), ValueError, "each letter once"),
    ),
)
def einsum(equation: str, *tensors: ExTensor) -> ExTensor:
    """Products of tensors summed over the letters that the result does not name.

    Args:
        equation: one term of letters per tensor, and the result's, as ``"bij,bjk->bik"``; without
            ``->`` the result has the letters that occur once, sorted. No ellipsis, no diagonals.
        tensors: multiplied from left to right, two at a time, by batched matrix products.

    Returns:
        One axis for each letter of the result.

    Raises:
        TypeError, ValueError: for another equation, or lengths that differ for a letter.

    Example:
        >>> a, b = et.ExTensor([[1, 2], [3, 4]]), et.ExTensor([[1, 0], [0, 2]])
        >>> et.einsum("ij,jk->ik", a, b).tolist()
        [[1, 4], [3, 8]]
    """
    tensors_only("einsum", *tensors)
    terms, right = _parse(equation, tensors)
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, size in zip(term, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"einsum: expected one length for {letter!r}, got {sizes[letter]} and {size}"
                )
    labels, result = terms[0], tensors[0]
    for i in range(1, len(tensors)):
        needed = set("".join(terms[i + 1 :]) + right)
        labels, result = _contract(labels, result, terms[i], tensors[i], needed, sizes)
    labels, result = _sum_out(labels, result, set(right))
    return result.permute(tuple(labels.index(letter) for letter in right))


def _sum_out(labels: str, x: ExTensor, needed: set[str]) -> tuple[str, ExTensor]:
    gone = tuple(i for i, letter in enumerate(labels) if letter not in needed)
    if not gone:
        return labels, x
    return "".join(letter for letter in labels if letter in needed), x.sum(gone)


def _contract(
    la: str, a: ExTensor, lb: str, b: ExTensor, needed: set[str], sizes: dict[str, int]
) -> tuple[str, ExTensor]:
    """One batched matrix product: letters in both and needed are batch, not needed are summed."""
    la, a = _sum_out(la, a, needed | set(lb))
    lb, b = _sum_out(lb, b, needed | set(la))
    batch = [c for c in la if c in lb and c in needed]
    summed = [c for c in la if c in lb and c not in needed]
    rows = [c for c in la if c not in lb]
    columns = [c for c in lb if c not in la]

    def total(letters: list[str]) -> int:
        return math.prod(sizes[c] for c in letters)

    left = a.permute(tuple(la.index(c) for c in (*batch, *rows, *summed)))
    right = b.permute(tuple(lb.index(c) for c in (*batch, *summed, *columns)))
    product = left.reshape((total(batch), total(rows), total(summed))) @ right.reshape(
        (total(batch), total(summed), total(columns))
    )
    labels = [*batch, *rows, *columns]
    return "".join(labels), product.reshape(tuple(sizes[c] for c in labels))
