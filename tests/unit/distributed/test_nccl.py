"""Ranks with GPUs: NCCL's calls on a binding made of numpy, and what all communicators promise."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.backends import registry
from extensor.backends.generic import GenericBackend
from extensor.backends.unsupported import Unsupported
from extensor.distributed import (
    GRAD_COMM,
    CollectiveTimeout,
    Communicator,
    GatheredBuckets,
    GradientBuckets,
    LocalCommunicator,
    NCCLCommunicator,
    make_reduction,
    peer_memory,
    run_ranks,
)
from tests.unit.distributed import contract, fake_nccl

DTYPES = [dtype for dtype in contract.DTYPES if dtype != "int16"]


def with_gpus(size: int, program: Callable[[NCCLCommunicator, Any], Any]) -> list[Any]:
    """Run a program on ranks with a GPU each."""

    def run(host: LocalCommunicator) -> Any:
        xp = fake_nccl.Gpu()
        return program(NCCLCommunicator(host, xp=xp, binding=fake_nccl.BINDING), xp)

    return run_ranks(size, run)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives(size: int, dtype: str) -> None:
    with_gpus(size, lambda ranks, xp: contract.check_collectives(ranks, dtype, xp.asarray))


def test_rows_and_columns_of_ranks() -> None:
    """Parts keep the GPU that the rank has."""

    def program(ranks: NCCLCommunicator, xp: Any) -> int:
        contract.check_split(ranks, xp.asarray)
        return fake_nccl.LOCAL.device

    assert with_gpus(4, program) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", contract.DTYPES)
def test_what_is_not_on_a_gpu_goes_the_other_way(dtype: str) -> None:
    def program(ranks: NCCLCommunicator, xp: Any) -> None:
        contract.check_collectives(ranks, dtype)
        contract.check_objects(ranks)

    with_gpus(3, program)


def test_a_result_is_there_only_after_waiting() -> None:
    def program(ranks: NCCLCommunicator, xp: Any) -> None:
        x = xp.asarray(np.ones(3, np.float32))
        work = ranks.all_reduce(x)
        ranks.barrier()
        assert x.tolist() == [1.0] * 3
        work.wait()
        assert x.tolist() == [2.0] * 3
        with ranks.beside() as queued:
            work = ranks.all_reduce(x)
            work.wait()
        assert queued
        ranks.join()
        assert x.tolist() == [4.0] * 3

    with_gpus(2, program)


def test_each_rank_takes_a_gpu_of_its_own() -> None:
    assert with_gpus(3, lambda ranks, xp: fake_nccl.LOCAL.device) == [0, 1, 2]

    def too_few(host: LocalCommunicator) -> None:
        NCCLCommunicator(host, xp=fake_nccl.Gpu(2), binding=fake_nccl.BINDING)

    with pytest.raises(RuntimeError, match="got ranks 0, 2 that share some"):
        run_ranks(3, too_few)


def test_a_missing_rank_is_named() -> None:
    aborted = []

    def program(ranks: NCCLCommunicator, xp: Any) -> None:
        ranks.timeout = 0.3
        if ranks.rank != 1:
            try:
                ranks.all_reduce(xp.asarray(np.ones(3, np.float32))).wait()
            finally:
                aborted.append(ranks._comm.aborted)

    with pytest.raises(CollectiveTimeout, match="all_reduce: .* for rank 1, which did not call"):
        run_ranks(
            3,
            lambda host: program(
                NCCLCommunicator(host, xp=(xp := fake_nccl.Gpu()), binding=fake_nccl.BINDING), xp
            ),
        )
    assert True in aborted


def test_what_nccl_does_not_add_is_refused() -> None:
    def program(ranks: NCCLCommunicator, xp: Any) -> None:
        with pytest.raises(TypeError, match="int16; cast it first"):
            ranks.all_reduce(xp.asarray(np.ones(3, np.int16)))
        with pytest.raises(ValueError, match="one device"):
            ranks.all_gather(xp.asarray(np.ones(3)), np.ones(6))

    with_gpus(2, program)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> GenericBackend:
    """The generic methods on the array module of a GPU, as the device "cuda"."""
    backend = GenericBackend("cuda", fake_nccl.Gpu())
    made = registry._made
    monkeypatch.setattr(registry, "_made", lambda name: backend if name == "cuda" else made(name))
    return backend


@pytest.fixture(params=["peer memory", "collectives"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether GPUs reach each other's memory."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0" if request.param == "peer memory" else "1")
    return str(request.param)


@pytest.mark.parametrize("name", GRAD_COMM)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.usefixtures("path")
def test_gradients_have_the_bits_of_the_cpus_ranks(
    on_gpu: GenericBackend, name: str, ranks: int
) -> None:
    """Packed and added on the device, without the host; float sums in one order."""
    rng = np.random.default_rng(ranks)
    grads = rng.standard_normal((2 * ranks, 128)).astype(np.float32)
    grads *= np.exp2(rng.integers(-60, 20, grads.shape)).astype(np.float32)

    def program(comm: Communicator, device: str) -> bytes:
        xp = on_gpu.xp if device == "cuda" else np
        reduction = make_reduction(name, 128, comm, device=device)
        out = xp.zeros(128, np.float32)
        for step in range(2):
            for grad in grads[2 * comm.rank : 2 * comm.rank + 2]:
                reduction.add(xp.asarray(grad))
            reduction.all_reduce(out, len(grads), step).wait()
        return bytes(np.asarray(out).tobytes())

    def gpu(comm: NCCLCommunicator, xp: Any) -> bytes:
        comm.host.all_reduce = comm.host.all_to_all = None  # type: ignore[method-assign, assignment]
        return program(comm, "cuda")

    assert with_gpus(ranks, gpu) == run_ranks(ranks, lambda comm: program(comm, "cpu"))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_peer_memory_is_used_again(
    on_gpu: GenericBackend, path: str, bits: int, ranks: int, error_feedback: bool
) -> None:
    """Two buckets of one lane, the second larger, all-reduced and scattered in turns."""
    sizes = (96 * ranks, 32 * ranks, 320 * ranks)

    def program(comm: Communicator, device: str) -> list[bytes]:
        xp = on_gpu.xp if device == "cuda" else np
        how: dict[str, Any] = {"device": device, "error_feedback": error_feedback}
        made = [
            make_reduction(f"mxint{bits}", size, comm, number=2 * i, **how)
            for i, size in enumerate(sizes)
        ]
        if device == "cuda":
            assert {m.path.partition(":")[0] for m in made} == {path}  # type: ignore[attr-defined]
        found = []
        for step in range(6):
            number = step % 3
            rng = np.random.default_rng((step, comm.rank))
            made[number].add(xp.asarray(rng.standard_normal(sizes[number], dtype=np.float32)))
            whole = step != 4
            out = xp.zeros(sizes[number] // (1 if whole else ranks), np.float32)
            call = made[number].all_reduce if whole else made[number].reduce_scatter
            call(out, 3.0, step).wait()
            found.append(np.asarray(out).tobytes())
        return found

    expected = run_ranks(ranks, lambda comm: program(comm, "cpu"))
    assert with_gpus(ranks, lambda comm, xp: program(comm, "cuda")) == expected


def test_why_ranks_have_no_peer_memory(
    on_gpu: GenericBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason of one rank is that of all, and sums go through collectives."""

    def program(comm: NCCLCommunicator, xp: Any, reason: str) -> None:
        found = comm.peer_memory(1 << 10)
        assert isinstance(found, Unsupported), found
        assert reason in found.reason

    def fails(handle: bytes, flags: int) -> int:
        if fake_nccl.LOCAL.device == 1:
            raise fake_nccl.CUDARuntimeError("cudaErrorPeerAccessUnsupported:\n no")
        return 1

    def without(comm: NCCLCommunicator, xp: Any) -> None:
        xp.cuda.runtime.ipcOpenMemHandle = fails
        program(comm, xp, "rank 1: cudaErrorPeerAccessUnsupported: no")

    with_gpus(3, without)
    with monkeypatch.context() as patch:
        numbers = itertools.count()
        patch.setattr(peer_memory.socket, "gethostname", lambda: f"machine{next(numbers)}")
        with_gpus(3, lambda comm, xp: program(comm, xp, "ranks on several machines"))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with_gpus(3, lambda comm, xp: program(comm, xp, "NCCL_P2P_DISABLE=1"))
    assert LocalCommunicator().peer_memory(1).reason == "ranks without GPUs"


def test_memory_is_freed_when_no_rank_has_it_open(
    on_gpu: GenericBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rank cannot open another's memory; CUDA's runtime demands that order."""
    opened: list[int] = []

    class Memory(fake_nccl._Memory):
        def __del__(self) -> None:
            opened.append(0 if self.ptr in opened else -1)

    def program(comm: NCCLCommunicator, xp: Any) -> None:
        def opens(handle: bytes, flags: int) -> int:
            if comm.rank == 1 and len(mine) == 1:
                raise fake_nccl.CUDARuntimeError("no")
            mine.append(int.from_bytes(handle, "little"))
            opened.append(mine[-1])
            return mine[-1]

        def closes(address: int) -> None:
            time.sleep(0.05 * comm.rank)
            mine.remove(address)
            opened.remove(address)

        mine: list[int] = []
        xp.cuda.Memory = Memory
        xp.cuda.runtime.ipcOpenMemHandle, xp.cuda.runtime.ipcCloseMemHandle = opens, closes
        assert isinstance(comm.peer_memory(1 << 10), Unsupported)
        assert not mine

    with_gpus(3, program)
    assert opened == [-1] * 3


def test_a_closed_part_gives_back_what_it_took(on_gpu: GenericBackend) -> None:
    """Connections, the others' memory, then its own; and says so when it is called again."""

    def program(comm: NCCLCommunicator, xp: Any) -> None:
        opened: list[int] = []

        def opens(handle: bytes, flags: int) -> int:
            opened.append(int.from_bytes(handle, "little"))
            return opened[-1]

        xp.cuda.runtime.ipcOpenMemHandle = opens
        xp.cuda.runtime.ipcCloseMemHandle = opened.remove
        part = comm.split(comm.rank // 2)
        assert isinstance(part, NCCLCommunicator)
        memory = part.peer_memory(1 << 10)
        assert not isinstance(memory, Unsupported) and len(opened) == 1
        connections = list(part._comms)
        array = xp.asarray(np.ones(4, np.int32))
        part.all_reduce(array).wait()
        own = weakref.ref(memory._owner)
        del memory
        part.close()
        assert array.tolist() == [2] * 4
        assert not opened and own() is None and all(c.aborted for c in connections)
        for call in (lambda: part.all_reduce(array), lambda: part.peer_memory(8)):
            with pytest.raises(RuntimeError, match="after its close; the way out: split anew"):
                call()
        comm.all_reduce(array).wait()

    with_gpus(4, program)


def test_a_sum_stays_until_all_have_read_it(
    on_gpu: GenericBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in memory of the caller's stream, which does not wait for the lane that packs it."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")

    def program(comm: NCCLCommunicator, xp: Any) -> None:
        reduction = make_reduction("mxint8", 64, comm, device="cuda")
        out = xp.zeros(64, np.float32)
        for _ in range(2):
            reduction.add(xp.asarray(np.ones(64, np.float32)))
        held = weakref.ref(reduction._sum)  # type: ignore[attr-defined]
        work = reduction.all_reduce(out, 4.0)
        assert held() is not None
        work.wait()
        assert held() is None
        assert out.tolist() == [1.0] * 64

    with_gpus(2, program)


def test_a_gpu_stops_waiting_for_a_missing_rank(on_gpu: GenericBackend) -> None:
    """A collective's timeout lets the barrier's kernel go, too; else the process could not end."""

    def program(comm: NCCLCommunicator, xp: Any) -> None:
        memory = comm.peer_memory(256)
        assert not isinstance(memory, Unsupported)
        stopped, abort = [], comm._comm.abort

        def aborts() -> None:
            stopped.append(bool(memory._stop[0]))
            abort()

        comm._comm.abort, comm.timeout = aborts, 0.3
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                comm.all_reduce(xp.asarray(np.ones(3, np.float32))).wait()
            assert stopped == [True]  # NCCL waits for the GPU when it ends
            on_gpu.peer_barrier(memory._flags, 0, memory._stop)
            with pytest.raises(RuntimeError, match="no longer waits .*: start all ranks anew"):
                memory.barrier()

    with_gpus(2, program)


@pytest.mark.parametrize("name", ["exact", "mxint8", "float32"])
def test_buckets_are_reduced_beside_the_backward_pass(
    on_gpu: GenericBackend, path: str, name: str
) -> None:
    """The gradients of ranks without NCCL, and all reductions queued before `finish` waits."""

    def program(comm: Communicator) -> list[bytes]:
        layers = et.nn.Sequential(*(et.nn.Linear(8, 8, rng=i) for i in range(3))).to("cuda")
        params = list(layers.parameters())
        buckets = GradientBuckets(params, comm, name, bucket_bytes=300)
        for step in range(2):
            for part in range(3):
                x = np.random.default_rng((step, part, comm.rank)).standard_normal((4, 8))
                with buckets.micro_batch(last=part == 2, step=step):
                    layers(et.ExTensor(x.astype(np.float32)).to("cuda")).square().sum().backward()
            if isinstance(comm, NCCLCommunicator):
                assert buckets._started == len(buckets.buckets) == 3
                assert all(b.work is not None and b.work._current is None for b in buckets.buckets)
            buckets.finish(step)
            if isinstance(comm, NCCLCommunicator):
                assert comm._stream.joined == comm._stream.total
                collectives = path == "collectives" or name != "mxint8"
                assert (comm._stream.total > 0) is collectives
                assert all(lane.joined == 0 for lane in comm._lanes)
        return [np.asarray(p.grad.data).tobytes() for p in params if p.grad is not None]

    expected = run_ranks(2, program)
    assert with_gpus(2, lambda comm, xp: program(comm)) == expected


@pytest.mark.parametrize("recipe", ["mxfp4_all", "nvfp4_nvidia"])
def test_gathered_weights_make_the_bits_of_whole_ones(on_gpu: GenericBackend, recipe: str) -> None:
    """Packed and gathered on the device; what ranks agree on goes through the host."""

    def program(comm: Communicator, gathers: bool) -> tuple[list[bytes], Any]:
        pairs = itertools.pairwise((64, 64, 128, 64, 64, 64))
        layers = [et.nn.Linear(k, n, bias=False, rng=i) for i, (k, n) in enumerate(pairs)]
        model = et.nn.Sequential(*layers).to("cuda")
        et.nn.apply_recipe(model, recipe, 0)
        buckets: Any = (
            GatheredBuckets(model, comm, "exact", 1)
            if gathers
            else GradientBuckets(list(model.parameters()), comm, "exact", 1)
        )
        for step in range(2):
            x = np.random.default_rng((step, comm.rank)).standard_normal((8, 64))
            with buckets.micro_batch(last=True, step=step):
                model(et.ExTensor(x.astype(np.float32)).to("cuda")).square().mean().backward()
            buckets.finish(step)
            if gathers:
                buckets.gather()
        sums = [np.asarray(bucket.sums).reshape(-1) for bucket in buckets.buckets]
        mine = sums if gathers else [each.reshape(2, -1)[comm.rank] for each in sums]
        return [each.tobytes() for each in mine], buckets

    whole = with_gpus(2, lambda comm, xp: program(comm, False))
    parts = with_gpus(2, lambda comm, xp: program(comm, True))
    for (expected, _), (found, buckets) in zip(whole, parts, strict=True):
        assert found == expected
        received = sum(map(len, found))  # of the other rank, were it float32
        assert 0 < buckets.gathered_bytes < 4 * received
