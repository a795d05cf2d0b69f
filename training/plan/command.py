"""`plan`: the fastest ways of dividing a model among GPUs that fit their memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from extensor.errors import unknown_name

from ..rundir import UsageError
from .cost import GRAD_BYTES, Cost, Layout, Setup, cost
from .hardware import GPUS, LINKS, RECIPES
from .shapes import SHAPES

__all__ = ["PlanArgs", "plan", "plans"]

SHARDS = ("none", "states", "gradients", "parameters")
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """What is to be trained, on what."""

    model: Annotated[str, tyro.conf.arg(metavar="NAME")] = "llama-70b"
    """The decoder's shape: llama-8b, llama-70b, llama-405b or gpt-wide."""
    gpus: int = 1024
    """How many GPUs."""
    gpu: str = "h100"
    """Each of them: h100 or h200."""
    node: int = 8
    """GPUs of one machine, which NVLink connects."""
    link: str = "ib400"
    """Between machines, for each GPU: nvlink4, ib400, ib200, ethernet100 or ethernet25."""
    tokens: int = 1 << 22
    """Tokens of a step, on all GPUs."""
    context: int = 8192
    """Tokens of a sequence."""
    recipe: str = "all"
    """One of bf16, fp8_block, mxfp8_rebased, mxfp4 and mxfp4_all, or all."""

    def __post_init__(self) -> None:
        for name, value, table in (
            ("model", self.model, SHAPES), ("gpu", self.gpu, GPUS), ("link", self.link, LINKS),
            ("recipe", self.recipe, ["all", *RECIPES]),
        ):  # fmt: skip
            if value not in table:
                raise UsageError(f"--{name}: {unknown_name(name, value, table)}")
        for name in ("gpus", "node", "tokens", "context"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if self.gpus > self.node and self.gpus % self.node:
            raise UsageError(
                f"--gpus: expected a multiple of the {self.node} of a machine, got {self.gpus}"
            )

    @property
    def setup(self) -> Setup:
        """The same as records."""
        return Setup(
            SHAPES[self.model], self.gpus, self.node, GPUS[self.gpu], LINKS["nvlink4"],
            LINKS[self.link], self.tokens, self.context,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A way of dividing the work, in words, and what it costs."""

    recipe: str
    gather: str
    layout: Layout
    cost: Cost


def plans(args: PlanArgs) -> list[Plan]:
    """All ways that fit the memory, the fastest first."""
    setup = args.setup
    recipes = list(RECIPES) if args.recipe == "all" else [args.recipe]
    found = []
    for recipe, tensor in itertools.product(recipes, _powers(min(args.node, args.gpus))):
        data = setup.gpus // tensor
        fits = setup.gpus % tensor == 0 and setup.shape.kv_heads % tensor == 0
        if not fits or setup.tokens < data * setup.context:
            continue
        for shard, grads in itertools.product(SHARDS, GRAD_BYTES):
            for group in [data] if shard == "none" else _powers(data)[1:] or [1]:
                for gather, nbytes in _gathers(recipe, shard):
                    layout = Layout(RECIPES[recipe], tensor, shard, group, nbytes, grads, 1)
                    best = _largest_micro_batch(setup, layout)
                    if best is not None:
                        found.append(Plan(recipe, gather, *best))
    return sorted(found, key=lambda each: (each.cost.seconds, each.cost.memory))


def _powers(most: int) -> list[int]:
    """Powers of two that divide a number."""
    return [2**i for i in range(most.bit_length()) if most % 2**i == 0]


def _gathers(recipe: str, shard: str) -> Iterator[tuple[str, float]]:
    if shard != "parameters":
        yield "", 0.0
        return
    yield "bfloat16", 2.0
    if RECIPES[recipe].weight < 2.0:
        yield "as the recipe", RECIPES[recipe].weight


def _largest_micro_batch(setup: Setup, layout: Layout) -> tuple[Layout, Cost] | None:
    """The largest micro-batch that fits, which gathers least often; None if none does."""
    best = None
    per_gpu = setup.tokens // setup.context * layout.tensor // setup.gpus
    for sequences in _powers(per_gpu):
        made = Layout(**{**vars(layout), "sequences": sequences})
        found = cost(setup, made)
        if found.memory <= setup.gpu.memory:
            best = made, found
    return best


def plan(args: PlanArgs, console: Console) -> None:
    """Print the fastest plans, and what FP4 gathering and MX reduction gain.

    Raises:
        UsageError: if no way fits the memory.
    """
    found = plans(args)
    setup = args.setup
    if not found:
        raise UsageError(
            f"plan: expected a way to fit {setup.shape.weights / 1e9:.1f} billion weights into "
            f"{setup.gpus} GPUs of {setup.gpu.memory / 1e9:.0f} GB with one sequence of "
            f"{setup.context} tokens for each, got none; the way out: more GPUs, or a shorter "
            "--context"
        )
    if not console.is_terminal:  # wide enough to read where nothing folds it
        console.width = max(console.width, 170)
    console.print(
        f"{args.model}: {setup.shape.weights / 1e9:.1f} billion weights, {args.gpus} {args.gpu} in "
        f"machines of {args.node}, {args.link} between them, {args.tokens:,} tokens a step"
    )
    console.print(_table(found[:ROWS], args))
    for line in gains(found):
        console.print(line)


def gains(found: list[Plan]) -> list[str]:
    """What each choice gains: the best plan beside the best without it."""
    best = found[0]
    lines = []
    for what, without in (
        ("a recipe below bfloat16", [p for p in found if p.recipe == "bf16"]),
        ("gathering in the recipe's format", [p for p in found if p.gather != "as the recipe"]),
        ("mxint8 gradients", [p for p in found if p.layout.grad_comm != "mxint8"]),
        ("tensor parallel blocks", [p for p in found if p.layout.tensor == 1]),
        ("dividing parameters", [p for p in found if p.layout.shard != "parameters"]),
    ):
        if not without:
            lines.append(f"without {what}: nothing fits")
        elif without[0] is not best:
            more = without[0].cost.seconds / best.cost.seconds - 1
            lines.append(f"without {what}: {100 * more:+.1f}% time ({_words(without[0])})")
    return lines


def _words(each: Plan) -> str:
    layout = each.layout
    parts = [each.recipe, f"tensor {layout.tensor}"]
    parts.append(layout.shard if layout.shard == "none" else f"{layout.shard} of {layout.group}")
    return ", ".join([*parts, each.gather or "no gathering", layout.grad_comm])


def _table(found: list[Plan], args: PlanArgs) -> Table:
    table = Table()
    for name in (
        "recipe", "tensor", "shard", "gather", "grads", "micro", "GB", "GB sent", "compute s",
        "comm s", "exposed s", "step s", "tokens/s/GPU",
    ):  # fmt: skip
        table.add_column(name)
    for each in found:
        layout, made = each.layout, each.cost
        shard = layout.shard if layout.shard == "none" else f"{layout.shard} / {layout.group}"
        comm, exposed = made.data_comm + made.tensor_comm, made.exposed + made.tensor_comm
        table.add_row(
            each.recipe, str(layout.tensor), shard, each.gather, layout.grad_comm,
            str(made.micro_batches), f"{made.memory / 1e9:.1f}", f"{made.sent / 1e9:.2f}",
            f"{made.compute:.3f}", f"{comm:.3f}", f"{exposed:.3f}", f"{made.seconds:.3f}",
            f"{args.tokens / made.seconds / args.gpus:,.0f}",
        )  # fmt: skip
    return table
