"""Every backend method on nothing but an array module.

This is the definition: correct on numpy and cupy, fast on neither. A backend subclasses it and
overrides what is hot. Kernels are compared with these methods.
"""

from extensor.backends.generic.conv_pool import GenericConvPool
from extensor.backends.generic.experts import GenericExperts
from extensor.backends.generic.optim import GenericOptim
from extensor.backends.generic.reduction import GenericReduction

__all__ = ["GenericBackend"]


class GenericBackend(GenericExperts, GenericConvPool, GenericOptim, GenericReduction):
    """Implements `extensor.backends.protocol.Backend` on the array module ``xp``."""
