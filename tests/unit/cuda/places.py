"""Where tests of kernels run: on the emulator, the Hopper GEMM too, or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.unit.cuda import hopper as emulated

__all__ = ["PLACES", "place"]

PLACES = ("emulated", "on a GPU")


def place(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    launching: Sequence[ModuleType],
    hopper: bool = True,
    quantizing: Sequence[ModuleType] = (),
    products: Sequence[ModuleType] = (),
) -> Any:
    """The array module of a fixture with `PLACES` as params.

    Args:
        request: the fixture's.
        monkeypatch: the fixture's.
        launching: modules whose ``launch`` is the emulator's.
        hopper: whether the GPU must have wgmma; else mma.sync of bfloat16.
        quantizing: the same of modules whose programs hold assembly.
        products: the same of modules whose programs hold wgmma.
    """
    if request.param == "on a GPU":
        xp = request.getfixturevalue("cuda").xp
        capability = xp.cuda.Device().compute_capability
        if capability != "90" if hopper else int(capability) < 80:
            pytest.skip(f"the GPU has compute capability {capability}")
        return xp
    emulator = request.getfixturevalue("emulator")
    for module in launching:
        monkeypatch.setattr(module, "launch", emulator)
    for modules, changed in (
        (quantizing, emulated.without_products),
        (products, emulated.source_of),
    ):
        for module in modules:
            monkeypatch.setattr(
                module,
                "launch",
                lambda source, *rest, changed=changed, **options: emulator(
                    changed(source), *rest, **options
                ),
            )
    return emulated.install(monkeypatch, emulator)
