"""Two processes over gloo: DistributedDataParallel and FSDP2 keep quantized models alike."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("extensor.torch")
if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import extensor.torch as ext

rank, port, kind, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.manual_seed(0)
layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)]
model = ext.quantize_(nn.Sequential(*layers), "mxfp4_all", seed=1)
if kind == "ddp":
    run = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    run = fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(run.parameters(), 1e-2)
losses = []
for step in range(6):
    torch.manual_seed(100 * step + rank)
    optimizer.zero_grad()
    loss = run(torch.randn(16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
state = {}
for name, value in model.state_dict().items():
    state[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
torch.save(state, f"{out}/{kind}{rank}.pt")
dist.destroy_process_group()
"""


def weights(kind: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The state of each process after training."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(port), kind, str(folder)], stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    for process in running:
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors.decode()[-3000:]
    return [torch.load(folder / f"{kind}{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_have_the_same_weights(kind: str, tmp_path: Path) -> None:
    first, second = weights(kind, tmp_path)
    assert first.keys() == second.keys() and "0.quant_clock" in first
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert int(first["0.quant_clock"]) == 6
