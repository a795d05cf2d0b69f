"""Memory, bytes and time of one optimizer step, for one way of dividing a model among GPUs.

A model of a few terms: products at measured rates, collectives at bytes over bandwidth plus hops of
a ring. docs/scaling.md compares it with what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .hardware import RECIPES, Gpu, Link, PlanRecipe
from .shapes import Shape

__all__ = ["GRAD_BYTES", "Cost", "Layout", "Setup", "cost"]

GRAD_BYTES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "float32": (4.0, 4.0),
        "bfloat16": (2.0, 2.0),
        "mxint8": (1 + 1 / 32, 1 + 1 / 32),
        "exact": (8 + 2 / 32, 4.0),
    }
)
"""Bytes a value in the scatter and the gather; of `extensor.distributed.GradientReduction`."""
GRAD_MEMORY: Mapping[str, float] = MappingProxyType(
    {"float32": 0.0, "bfloat16": 12.0, "mxint8": 12.0, "exact": 24.0}
)
"""Bytes of memory that move where a value is packed, summed and unpacked, half of them to pack."""
START = 25e-6
"""Seconds that a collective takes whatever its size: NCCL's, measured over NVLink."""
BACKWARD = 2 / 3
"""The share of a step's computing after the first gradients are there."""
HEAD_RATE = RECIPES["bf16"].rate
"""The head's products are in bfloat16 under all recipes."""
ADAM_BYTES = 28.0
"""Bytes that AdamW reads and writes for a weight: w, g, m, v, and three of them again."""


@dataclass(frozen=True)
class Setup:
    """What is trained, on what.

    Attributes:
        shape: the decoder.
        gpus: how many.
        node: GPUs of one machine.
        gpu: each of them.
        inner: the link within a machine.
        outer: the link between machines.
        tokens: of a step, on all GPUs.
        context: tokens of a sequence.
    """

    shape: Shape
    gpus: int
    node: int
    gpu: Gpu
    inner: Link
    outer: Link
    tokens: int
    context: int


@dataclass(frozen=True)
class Layout:
    """One way of dividing the work.

    Attributes:
        recipe: rates and bytes of the recipe.
        tensor: GPUs that share each block (tensor parallel).
        shard: what is divided: "none", "states", "gradients" or "parameters".
        group: GPUs among which it is divided.
        gather: bytes of a weight when parameters are gathered.
        grad_comm: a name in `GRAD_BYTES`.
        sequences: in a micro-batch.
    """

    recipe: PlanRecipe
    tensor: int
    shard: str
    group: int
    gather: float
    grad_comm: str
    sequences: int


@dataclass(frozen=True)
class Cost:
    """What a step takes on each GPU: bytes held, bytes sent, seconds.

    Attributes:
        weights: held, with gradients and optimizer states.
        activations: held for backward, and scores.
        sent: between data-parallel GPUs.
        compute: of products, attention and the optimizer.
        tensor_comm: of tensor parallel collectives, which nothing hides.
        data_comm: of gradients and gathered parameters.
        exposed: what of ``data_comm`` no computing hides.
        micro_batches: on each GPU.
    """

    weights: float
    activations: float
    sent: float
    compute: float
    tensor_comm: float
    data_comm: float
    exposed: float
    micro_batches: int

    @property
    def memory(self) -> float:
        """All bytes held."""
        return self.weights + self.activations

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.tensor_comm + self.exposed


def collective(nbytes: float, ranks: int, link: Link, calls: float) -> float:
    """Seconds of a gather or a scatter that leaves ``nbytes``: a ring, in so many calls."""
    if ranks == 1:
        return 0.0
    hops = ranks - 1
    return nbytes * hops / ranks / link.bandwidth + calls * (START + hops * link.latency)


def packing(name: str, values: float, kept: float, gpu: Gpu) -> float:
    """Seconds to pack so many gradients, and to unpack those that are kept."""
    return GRAD_MEMORY[name] / 2 * (values + kept) / gpu.bandwidth


def making(nbytes: float, values: float, gpu: Gpu) -> float:
    """Seconds to turn float32 into what travels, or back, at so many bytes a value."""
    return (4.0 + nbytes) * values / gpu.bandwidth if nbytes < 4 else 0.0


def cost(setup: Setup, layout: Layout) -> Cost:
    """The cost of a step.

    Args:
        setup: what is trained, on what.
        layout: how it is divided.
    """
    shape, tensor, group = setup.shape, layout.tensor, layout.group
    data = setup.gpus // tensor
    tokens = setup.tokens / data
    micro_tokens = layout.sequences * setup.context
    micro = max(1, round(tokens / micro_tokens))
    own = shape.weights / tensor
    data_link = setup.inner if setup.gpus <= setup.node else setup.outer
    group_link = setup.inner if group * tensor <= setup.node else setup.outer

    blocks = shape.layers * shape.block_operations(setup.context) * tokens / tensor
    head = 6.0 * shape.head * tokens / tensor
    held = own / (1 if layout.shard == "none" else group)
    compute = blocks / layout.recipe.rate + head / HEAD_RATE
    compute += ADAM_BYTES * held / setup.gpu.bandwidth

    per_collective = 2.0 * tokens * shape.width  # bfloat16 of all tokens
    tensor_comm = 8 * shape.layers * collective(per_collective, tensor, setup.inner, micro)

    scatter, gather = GRAD_BYTES[layout.grad_comm]
    calls = shape.layers
    near, far = collective(scatter * own, group, group_link, calls), 0.0
    sent = scatter * own * (group - 1) / group
    if data > group:  # parts are summed over the groups
        others = data // group
        far = collective((scatter + gather) * own / group, others, data_link, 2 * calls)
        sent += (scatter + gather) * own / group * (others - 1) / others
    # whole weights again: gradients gathered, new weights gathered, or blocks before each use
    divided = layout.shard == "parameters"
    each = {"none": gather, "parameters": layout.gather}.get(layout.shard, 4.0)
    times = 2 * micro if divided else 1
    near += times * collective(each * own, group, group_link, calls)
    sent += times * each * own * (group - 1) / group
    if data > 1:
        kept = own / group if layout.shard in ("gradients", "parameters") else own
        compute += packing(layout.grad_comm, own, kept, setup.gpu)
    if divided and group > 1:  # each rank's rows for two products; then all rows, at each use
        compute += making(each, 2 * own / group + times * own, setup.gpu)
    room = compute * (1.0 if divided else BACKWARD)
    exposed = 0.0
    for link in {group_link, data_link}:
        seconds = near * (link is group_link) + far * (link is data_link)
        exposed += seconds / calls + max(0.0, seconds * (1 - 1 / calls) - link.hidden * room)

    return Cost(
        weights=_weights(layout, own, shape),
        activations=_activations(layout, shape, micro_tokens),
        sent=sent,
        compute=compute,
        tensor_comm=tensor_comm,
        data_comm=near + far,
        exposed=exposed,
        micro_batches=micro,
    )


def _weights(layout: Layout, own: float, shape: Shape) -> float:
    """Bytes of float32 weights, gradients, two averages, and the products' operands."""
    parts = {"none": 0, "states": 2, "gradients": 3, "parameters": 4}[layout.shard]
    held = 4.0 * own * ((4 - parts) + parts / layout.group)
    operands = layout.recipe.weight * 2 * own  # by rows and by columns
    if layout.shard == "parameters":  # two blocks: the one in use and the one that comes
        operands *= 2 / shape.layers
    return held + operands


def _activations(layout: Layout, shape: Shape, tokens: float) -> float:
    """Bytes kept for backward, and the scores with their gradients in bfloat16."""
    blocks = shape.layers * shape.saved(layout.recipe.saved) * tokens
    return (blocks + 4.0 * shape.vocab * tokens) / layout.tensor
