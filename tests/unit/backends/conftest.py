"""Every variant of the kernels that this machine has, forced in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.matmul_cases import CORE, VARIANTS


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    if CORE is None:
        yield request.param
        return
    before = CORE.gemm_level()
    CORE.set_gemm_level(request.param)
    yield request.param
    CORE.set_gemm_level(before)
