"""Checks for derivatives and for equality to the bit."""

from extensor.testing.gradcheck import gradcheck, gradgradcheck
from extensor.testing.numeric import assert_bitwise_equal, first_difference

__all__ = ["assert_bitwise_equal", "first_difference", "gradcheck", "gradgradcheck"]
