"""The gradient engine: primitives, the tape, ExTensor. It knows no operation."""

import sys
from typing import NoReturn

from extensor.torch_names import attribute_error


def __getattr__(name: str) -> NoReturn:
    raise attribute_error("extensor.autograd", sys.modules[__name__], name)
