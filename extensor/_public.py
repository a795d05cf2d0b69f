"""The functions of the package `extensor`: whatever the `__all__` of a family names."""

from extensor.array_api.complex import *
from extensor.array_api.cumulative import *
from extensor.array_api.elementwise import *
from extensor.array_api.linalg.products import *
from extensor.array_api.manipulation import *
from extensor.array_api.namespace import *
from extensor.array_api.search import *
from extensor.autograd.functional import *
from extensor.ops import block_scaled as _block_scaled  # operations that are methods alone
from extensor.ops.activation import *
from extensor.ops.arithmetic import *
from extensor.ops.attention import *
from extensor.ops.class_loss import *
from extensor.ops.comparison import *
from extensor.ops.conv_pool import *
from extensor.ops.creation import *
from extensor.ops.einsum import *
from extensor.ops.elementwise import *
from extensor.ops.gated import *
from extensor.ops.heads import *
from extensor.ops.indexing import *
from extensor.ops.joining import *
from extensor.ops.loss import *
from extensor.ops.matmul import *
from extensor.ops.norm import *
from extensor.ops.reduce import *
from extensor.ops.rotary import *
from extensor.ops.shape import *
from extensor.ops.softmax import *
from extensor.ops.sort import *
from extensor.ops.trigonometry import *
