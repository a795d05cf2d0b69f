"""extensor inside PyTorch: recipes and kernels in torch modules.

    import extensor.torch as ext

    model = ext.quantize_(model, recipe="mxfp4", seed=0)

Training goes on as before: torch's autograd, optimizers and torch.compile. The package needs torch,
`pip install 'extensor[torch]'`, and nothing else in extensor imports it.
"""

from __future__ import annotations

from extensor.torch.require import load_torch

load_torch()

from extensor.torch import modules  # noqa: E402
from extensor.torch.blocked import BlockedTensor, to_blocked  # noqa: E402
from extensor.torch.clock import checkpoint_contexts  # noqa: E402
from extensor.torch.export import export  # noqa: E402
from extensor.torch.modules import Conv2d, Linear  # noqa: E402
from extensor.torch.quantize import (  # noqa: E402
    quantize_,
    quantized_modules,
    reset_telemetry,
    telemetry,
)
from extensor.torch.threads import share_threads  # noqa: E402

share_threads()

__all__ = [
    "BlockedTensor",
    "Conv2d",
    "Linear",
    "checkpoint_contexts",
    "export",
    "quantize_",
    "quantized_modules",
    "reset_telemetry",
    "telemetry",
    "to_blocked",
]
