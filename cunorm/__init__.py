"""Array normalization for people who write their own training loops on NumPy or CuPy.

Functions (`batch_norm_forward`, ...) take arrays and return arrays; layers
(`BatchNorm`, ...) are objects with ``forward`` and ``backward`` that hold parameters
and running statistics. Importing this package imports neither CuPy nor Numba.
"""

from ._version import __version__
from .config import is_available, show_config
from .convolution import Convolution, CudnnConvolution, MatmulConvolution
from .cpu.threads import get_num_threads, set_num_threads
from .distributed import Communicator, Moments, as_communicator, merge_moments
from .functional.batch_norm import (
    BatchNormSaved,
    batch_norm_backward,
    batch_norm_backward_reduce,
    batch_norm_backward_transform,
    batch_norm_double_backward,
    batch_norm_forward,
    batch_norm_statistics,
    batch_norm_transform,
    update_running_statistics,
)
from .functional.conv_batch_norm import (
    ConvBatchNormSaved,
    conv_batch_norm_backward,
    conv_batch_norm_forward,
)
from .functional.fold_batch_norm import fold_batch_norm
from .functional.group_norm import GroupNormSaved, group_norm_backward, group_norm_forward
from .functional.instance_norm import (
    InstanceNormSaved,
    instance_norm_backward,
    instance_norm_forward,
)
from .functional.layer_norm import (
    LayerNormSaved,
    layer_norm_backward,
    layer_norm_double_backward,
    layer_norm_forward,
)
from .functional.rms_norm import RMSNormSaved, rms_norm_backward, rms_norm_forward
from .functional.scale_shift import scale_shift_backward, scale_shift_forward
from .layers.batch_norm import BatchNorm
from .layers.conv_batch_norm import ConvBatchNorm
from .layers.group_norm import GroupNorm
from .layers.instance_norm import InstanceNorm
from .layers.layer_norm import LayerNorm
from .layers.rms_norm import RMSNorm
from .layers.scale_shift import ScaleShift
from .layers.sync_batch_norm import SyncBatchNorm

__all__ = [
    "BatchNorm",
    "BatchNormSaved",
    "Communicator",
    "ConvBatchNorm",
    "ConvBatchNormSaved",
    "Convolution",
    "CudnnConvolution",
    "GroupNorm",
    "GroupNormSaved",
    "InstanceNorm",
    "InstanceNormSaved",
    "LayerNorm",
    "LayerNormSaved",
    "MatmulConvolution",
    "Moments",
    "RMSNorm",
    "RMSNormSaved",
    "ScaleShift",
    "SyncBatchNorm",
    "__version__",
    "as_communicator",
    "batch_norm_backward",
    "batch_norm_backward_reduce",
    "batch_norm_backward_transform",
    "batch_norm_double_backward",
    "batch_norm_forward",
    "batch_norm_statistics",
    "batch_norm_transform",
    "conv_batch_norm_backward",
    "conv_batch_norm_forward",
    "fold_batch_norm",
    "get_num_threads",
    "group_norm_backward",
    "group_norm_forward",
    "instance_norm_backward",
    "instance_norm_forward",
    "is_available",
    "layer_norm_backward",
    "layer_norm_double_backward",
    "layer_norm_forward",
    "merge_moments",
    "rms_norm_backward",
    "rms_norm_forward",
    "scale_shift_backward",
    "scale_shift_forward",
    "set_num_threads",
    "show_config",
    "update_running_statistics",
]
