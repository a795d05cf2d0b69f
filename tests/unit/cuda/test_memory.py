"""The ledger on a GPU: the pool's bytes, by the counts of the CPU."""

from __future__ import annotations

from typing import Any

from tests.unit.inspect.test_memory import counted


def test_every_byte_of_a_step_on_a_gpu(gpu: Any) -> None:
    counted("cuda")
