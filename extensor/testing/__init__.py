"""Checks of gradients against differences, and of arrays for equal bits."""

from extensor.testing.gradcheck import gradcheck, gradgradcheck
from extensor.testing.numeric import assert_bitwise_equal, first_difference

__all__ = ["assert_bitwise_equal", "first_difference", "gradcheck", "gradgradcheck"]


def __dir__() -> list[str]:
    return sorted(__all__)
