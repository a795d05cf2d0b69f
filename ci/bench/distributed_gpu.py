"""Several GPUs of one machine: weak scaling, overlap, sums and gathers beside bfloat16's, bits.

    mpirun -n 2 python ci/bench/distributed_gpu.py [--only bits scaling sums gather zero3]

bits     a small GPT trained with ``exact`` sums over NCCL, over MPI through the host, and by one
         rank with all micro-batches: one checksum of the weights
scaling  steps of a GPT of 30 million parameters, and of a block of width 4096 with its update: all
         ranks alone at once, then together, with as much work for each. `of_alone` is the weak
         scaling. `hidden` is the share of the reductions' time in which the step goes on; the
         timeline of the last step's buckets is written, too. `captured` rows replay both steps from
         CUDA graphs, NCCL's sums in them
sums     the gradient sum of 100 MB of float32 with each ``--grad-comm``, beside NCCL's all-reduce
         of the same gradients cast to bfloat16 and back, in one bucket; `bare_ms` is without casts,
         `path` whether GPUs read each other's memory
gather   the weights of a block of width 4096, of which each rank has a part, whole on all ranks: in
         MXFP4, NVFP4 and MXFP8, packed before they travel, and in bfloat16, cast before. `ms` is of
         one of a step's two gathers; NVFP4's largest magnitudes are found once a step
zero3    a step's gathers as ``--shard parameters`` calls them (distributed_gather.py)
profile  what the parts of sums and gathers take on the GPU's clock (distributed_profile.py)

Sums and gathers are called from Python, and replayed from CUDA graphs (`captured`; ``--captured``:
these alone).
A figure is the median over rounds of the slowest rank's time, in turns. A collective that does
not end in `--rank-timeout` seconds is an error. After `--deadline` seconds the program says where
it is, and ends. `NCCL_P2P_DISABLE=1` in the environment measures GPUs without NVLink or PCIe
between them. ``--tiny --device cpu`` tries the program without a GPU. Needs a GPU for each rank and
the extra ``nccl``.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import extensor as et
from ci.bench.contest import GPU_PACKAGES, arguments, gpu_of, options, write
from ci.bench.distributed_gather import gather, zero3
from ci.bench.distributed_profile import parts_of_gathers, parts_of_sums
from extensor.backends import registry
from extensor.distributed import (
    GRAD_COMM,
    GradientBuckets,
    LocalCommunicator,
    connect,
    make_reduction,
    on_device,
)
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build as build_gpt
from extensor.nn.recipe import apply_recipe
from extensor.optim import AdamW

BUCKETS = {"4 MiB": 1 << 20, "32 MiB": 8 << 20, "50 MB": 12 << 20, "100 MB": 24 << 20}
"""Values of a bucket of float32."""
MODELS = ("GPT", "block")
HALF = np.dtype(ml_dtypes.bfloat16)
Step = Callable[[int], Any]


class Bench:
    """The ranks, the device, and how time is taken."""

    def __init__(self, args: Any) -> None:
        self.args, self.device, self.tiny = args, args.device, args.tiny
        self.host = connect()
        self.host.timeout = args.rank_timeout
        self.ranks: Any = on_device(self.host, args.device)
        self.backend = registry.get(args.device)
        self.xp = self.backend.xp
        self.rows: list[dict[str, Any]] = []
        eager = () if args.captured else (False,)
        self.modes = (*eager, True) if self.device == "cuda" else (False,)

    def settle(self) -> None:
        if self.device == "cuda":
            self.xp.cuda.Device().synchronize()

    def milliseconds(self, calls: dict[str, Step], burst: int, rounds: int = 0) -> dict[str, float]:
        """Medians of the slowest rank, the calls taking turns."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range((rounds or self.args.rounds) + 1):
            for name, call in calls.items():
                self.settle()
                self.host.barrier()
                began = time.perf_counter()
                for number in range(burst):
                    call(number)
                self.settle()
                took = np.array([time.perf_counter() - began])
                self.host.all_reduce(took, "max").wait()
                if turn:
                    times[name].append(float(took[0]) * 1e3 / burst)
        return {name: statistics.median(values) for name, values in times.items()}

    def captured(self, call: Step) -> Step:
        """What a call queues on the GPU, as a CUDA graph, without Python."""
        stream = self.xp.cuda.Stream(non_blocking=True)
        with stream:
            call(0)  # what is made once is made now
            stream.synchronize()
            self.host.barrier()
            stream.begin_capture()
            call(0)
            graph = stream.end_capture()
        return lambda number: graph.launch()

    def captured_step(self, step: Step) -> Step:
        """A step that is replayed from the third call on, as in training."""

        def whole(given: Any) -> None:
            step(0)

        train, given = et.capture(whole), et.zeros((1,)).to(self.device)
        return lambda number: train(given)

    def say(self, what: Any) -> None:
        if self.ranks.rank == 0:
            print(what, flush=True)

    def row(self, **row: Any) -> None:
        self.rows.append({"ranks": self.ranks.size, **row})
        self.say(self.rows[-1])

    def free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            self.xp.get_default_memory_pool().free_all_blocks()


# --- bits ---


def trained(bench: Bench, ranks: Any, steps: int = 4, parts: int = 8) -> str:
    """The checksum of a small GPT's weights after some steps of micro-batches."""
    width = 64 if bench.tiny else 256
    config = GPTConfig(vocab=256, context=64, layers=2, heads=4, width=width)
    model = build_gpt(config, np.random.default_rng(0)).to(bench.device)
    quant = apply_recipe(model, "mxfp4", 0)
    optimizer = AdamW(list(model.named_parameters()), lr=1e-3)
    buckets = GradientBuckets(list(model.parameters()), ranks, "exact", 1 << 18)
    mine = range(parts)[ranks.rank :: ranks.size]
    for step in range(steps):
        optimizer.zero_grad()
        for part in mine:
            quant.micro_batch = part
            tokens = np.random.default_rng((step, part)).integers(0, 256, (4, 65))
            inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].reshape(-1).copy()
            with buckets.micro_batch(last=part == mine[-1], step=step):
                scores = model(et.from_numpy(inputs, device=bench.device)).reshape(-1, 256)
                loss = et.cross_entropy(scores, et.from_numpy(labels, device=bench.device))
                (loss * (1 / parts)).backward()
        quant.micro_batch = 0
        buckets.finish(step)
        optimizer.step()
    found = hashlib.blake2b(digest_size=8)
    for param in model.parameters():
        found.update(np.ascontiguousarray(param.to("cpu").numpy()).data)
    return found.hexdigest()


def bits(bench: Bench) -> None:
    """The same weights however gradients travel."""
    sums = {
        "NCCL": trained(bench, bench.ranks),
        "MPI, through the host": trained(bench, bench.host),
        "one rank": trained(bench, LocalCommunicator()),
    }
    everyone = bench.host.all_gather_object(sums)
    found = {value for each in everyone for value in each.values()}
    bench.row(part="bits", name="exact", same=len(found) == 1, checksums=sums)
    if len(found) > 1:
        raise SystemExit(f"expected the same weights, got {everyone}")


# --- scaling ---


class TimedBuckets(GradientBuckets):
    """Buckets that note when each one's reduction begins and ends, on the GPU's clock."""

    events: list[tuple[Any, Any]]
    xp: Any

    def _reduce(self, bucket: Any) -> Any:
        if self.xp is np:
            return super()._reduce(bucket)
        begin, end = (self.xp.cuda.Event() for _ in range(2))
        stream = self.xp.cuda.get_current_stream()
        begin.record(stream)
        work = super()._reduce(bucket)
        work.wait()  # queued: this stream is the collectives' own
        end.record(stream)
        self.events.append((begin, end))
        return work


class UntimedBuckets(TimedBuckets):
    """Buckets of a captured step, whose events nobody can ask."""

    def _reduce(self, bucket: Any) -> Any:
        return GradientBuckets._reduce(self, bucket)


def gpt(bench: Bench) -> tuple[Any, Any]:
    """A GPT of 30 million parameters and its loss."""
    config = GPTConfig(vocab=8192, context=1024, layers=8, heads=8, width=512)
    if bench.tiny:
        config = GPTConfig(vocab=64, context=32, layers=2, heads=2, width=64)
    rng = np.random.default_rng(bench.ranks.rank)
    tokens = rng.integers(0, config.vocab, (16 if not bench.tiny else 2, config.context + 1))
    inputs = et.from_numpy(tokens[:, :-1].copy(), device=bench.device)
    labels = et.from_numpy(tokens[:, 1:].reshape(-1).copy(), device=bench.device)
    model = build_gpt(config, np.random.default_rng(1)).to(bench.device)
    return model, lambda: et.cross_entropy(model(inputs).reshape(-1, config.vocab), labels)


def block(bench: Bench) -> tuple[Any, Any]:
    """A transformer block of width 4096 and the mean square of its output."""
    width, tokens = (4096, 16384) if not bench.tiny else (64, 64)
    heads = max(1, width // 128)
    attention = et.nn.MultiheadAttention(width, heads, causal=True, bias=False, rng=1)
    feed_forward = et.nn.FeedForward(width, 4 * width, bias=False, rng=1)
    model = et.nn.TransformerBlock(attention, feed_forward, bias=False).to(bench.device)
    shape = (max(1, tokens // 1024), min(tokens, 1024), width)
    x = et.randn(shape, seed=bench.ranks.rank).to(bench.device)
    return model, lambda: model(x).square().mean()


def stepper(
    bench: Bench, make: Any, recipe: str, name: str, bucket_bytes: int, timed: bool = True
) -> tuple[Step, TimedBuckets | None]:
    """A training step on this rank alone (no name), or with all ranks' gradients."""
    model, loss_of = make(bench)
    quant = apply_recipe(model, recipe, 0, activations="bfloat16")
    optimizer = AdamW(list(model.named_parameters()), lr=1e-4)
    buckets = None
    if name:
        how = {"error_feedback": False} if "mxint" in name else {}
        params = list(model.parameters())
        kind = TimedBuckets if timed else UntimedBuckets
        buckets = kind(params, bench.ranks, name, bucket_bytes, clock=quant, **how)
        buckets.events, buckets.xp = [], bench.xp
    share = 1.0 / bench.ranks.size

    def step(number: int) -> None:
        optimizer.zero_grad()
        if buckets is None:
            loss_of().backward()
        else:
            buckets.events.clear()
            with buckets.micro_batch(last=True, step=quant.step):
                (loss_of() * share).backward()
            buckets.finish(quant.step)
        optimizer.step()

    return step, buckets


def timeline(bench: Bench, step: Step, buckets: TimedBuckets) -> dict[str, Any]:
    """When the buckets of one step are reduced; their time that the step does not wait for."""
    if bench.device == "cpu":
        return {}
    cuda = bench.xp.cuda
    step(0)
    bench.settle()
    bench.host.barrier()
    start, backward, end = (cuda.Event() for _ in range(3))
    join = bench.ranks.join
    joins: list[int] = []

    def joined() -> None:
        joins.append(1)
        if len(joins) == 2:  # the first is before the forward pass
            backward.record()
        join()

    start.record()
    bench.ranks.join = joined
    step(0)
    del bench.ranks.join
    end.record()
    bench.settle()

    def at(event: Any) -> float:
        return round(float(cuda.get_elapsed_time(start, event)), 3)

    spans = [(at(a), at(b)) for a, b in buckets.events]
    busy = sum(b - a for a, b in spans)
    exposed = max(0.0, max(b for _, b in spans) - at(backward))
    return {
        "backward_ends_ms": at(backward),
        "step_ends_ms": at(end),
        "reductions_ms": round(busy, 3),
        "exposed_ms": round(exposed, 3),
        "hidden": round(1 - exposed / busy, 3),
        "timeline_ms": spans,
    }


def scaling(bench: Bench) -> None:
    """Steps of a rank alone and of all ranks, each with the same work, eager and captured."""
    for title, make, recipes, bucket in (
        ("GPT of 30M", gpt, ("bf16", "mxfp4"), 32 << 20),
        ("block of width 4096", block, ("bf16", "mxfp4_all"), 64 << 20),
    ):
        if title.split()[0] not in bench.args.models:
            continue
        for recipe, captured in itertools.product(recipes, bench.modes):
            alone, _ = stepper(bench, make, recipe, "", bucket)
            if captured:
                alone = bench.captured_step(alone)
            for name in bench.args.names:
                step, buckets = stepper(bench, make, recipe, name, bucket, not captured)
                assert buckets is not None
                together = bench.captured_step(step) if captured else step
                for number in range(3 if captured else 0):
                    alone(number)
                    together(number)
                calls = {"alone": alone, "together": together}
                times = bench.milliseconds(calls, 2 if "block" in title else 4, 5)
                bench.row(
                    part="scaling", model=title, recipe=recipe, name=name, captured=captured,
                    alone_ms=round(times["alone"], 2), step_ms=round(times["together"], 2),
                    of_alone=round(times["alone"] / times["together"], 3),
                    **({} if captured else timeline(bench, step, buckets)),
                )  # fmt: skip
                del step, buckets, calls, together
                bench.free()
            del alone
            bench.free()


# --- sums ---


def run(reductions: list[Any], grad: Any, out: Any, ranks: Any, bucket: int, number: int) -> None:
    """Sum all buckets beside the computation, as training does."""
    works = []
    for i, reduction in enumerate(reductions):
        part = slice(i * bucket, (i + 1) * bucket)
        with ranks.beside(i) as queued:
            reduction.add(grad[part])
            works.append(reduction.all_reduce(out[part], 1.0))
            if queued:
                works[-1].wait()
    while works:
        works = [work for work in works if not work.advance()]
    ranks.join()


def bfloat16_all_reduce(bench: Bench, grad: Any, casts: bool, held: Any, number: int) -> Any:
    """NCCL's own sum in bfloat16 of the whole gradient, and the sum as float32."""
    ranks = bench.ranks
    if casts:
        held = bench.backend.cast(grad, HALF)
    kind, stream = ranks._nccl.NCCL_BFLOAT16, bench.xp.cuda.get_current_stream().ptr
    at = held.data.ptr
    ranks._comm.allReduce(at, at, held.size, kind, ranks._ops["sum"], stream)
    return bench.backend.cast(held, np.dtype(np.float32)) if casts else held


def sums(bench: Bench) -> None:
    """Each way to sum, in buckets of several sizes, beside NCCL's bfloat16."""
    values = 24 << 20 if not bench.tiny else 1 << 14
    rng = np.random.default_rng(bench.ranks.rank)
    grad = bench.xp.asarray(rng.standard_normal(values, dtype=np.float32))
    out = bench.xp.empty_like(grad)
    for bucket_name, size in BUCKETS.items():
        bucket = min(size, values)
        calls: dict[str, Step] = {}
        if bench.device == "cuda":
            held = bench.backend.cast(grad, HALF)
            for name, casts in (("NCCL bfloat16", True), ("bare", False)):
                calls[name] = partial(bfloat16_all_reduce, bench, grad, casts, held)
        sent, paths = {}, {}
        for name in bench.args.names:
            how = {"error_feedback": False} if "mxint" in name else {}
            made = [
                make_reduction(
                    name, min(bucket, values - i * bucket), bench.ranks,
                    device=bench.device, number=i, **how,
                )
                for i in range(-(-values // bucket))
            ]  # fmt: skip
            paths[name] = made[0].path
            sent[name] = sum(reduction.wire_bytes() for reduction in made)
            calls[name] = partial(run, made, grad, out, bench.ranks, bucket)
        for captured in bench.modes:
            ready = {n: bench.captured(c) for n, c in calls.items()} if captured else calls
            times = bench.milliseconds(ready, 3)
            base = times.get("NCCL bfloat16")
            for name, sent_bytes in sent.items():
                bench.row(
                    part="sums", buckets=bucket_name, name=name, path=paths[name],
                    captured=captured,
                    ms=round(times[name], 3),
                    megabytes_sent=round(sent_bytes / 1e6, 1),
                    of_nccl_bfloat16=base and round(base / times[name], 3),
                    nccl_bfloat16_ms=base and round(base, 3),
                    bare_ms=base and round(times["bare"], 3),
                )  # fmt: skip
            del ready
        del calls
        bench.free()


def profile(bench: Bench) -> None:
    """What the parts of sums and gathers take."""
    if bench.device == "cuda":
        for row in parts_of_sums(bench) + parts_of_gathers(bench):
            bench.row(part="profile", **row)


CALLS: dict[str, Callable[[Bench], None]] = {
    "bits": bits, "scaling": scaling, "sums": sums, "gather": gather, "zero3": zero3,
    "profile": profile,
}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=9)
    parser.add_argument("--only", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--names", nargs="+", choices=list(GRAD_COMM), default=list(GRAD_COMM))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="to scale")
    parser.add_argument("--rank-timeout", type=float, default=60.0)
    parser.add_argument("--deadline", type=float, default=900.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--captured", action="store_true", help="no calls from Python")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the program")
    args = arguments(parser)
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    bench = Bench(args)
    link = "no P2P" if os.environ.get("NCCL_P2P_DISABLE") == "1" else ""
    for part in bench.args.only:
        began = time.perf_counter()
        CALLS[part](bench)
        bench.say(f"--- {part}: {time.perf_counter() - began:.0f} s")
        bench.free()
    if bench.ranks.rank == 0 and not bench.tiny:
        name = f"distributed-{bench.ranks.size}-gpus" + "-no-p2p" * bool(link)
        if len(bench.args.only) < len(CALLS):
            name += "".join(f"-{part}" for part in bench.args.only)
        about = {**gpu_of(bench.xp), "link": link or "as it is"}
        write(name, bench.rows, args=bench.args, about=about, packages=(*GPU_PACKAGES, "mpi4py"))
    bench.host.barrier()


if __name__ == "__main__":
    main()
