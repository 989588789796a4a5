"""Array normalization for people who write their own training loops on NumPy or CuPy.

Functions (`batch_norm_forward`, ...) take arrays and return arrays; layers
(`BatchNorm`) are objects with ``forward`` and ``backward`` that hold parameters
and running statistics. Importing this package imports neither CuPy nor Numba.
"""

from ._version import __version__
from .config import is_available, show_config
from .cpu.threads import get_num_threads, set_num_threads
from .distributed import Moments, merge_moments
from .functional.batch_norm import (
    BatchNormSaved,
    batch_norm_backward,
    batch_norm_backward_reduce,
    batch_norm_backward_transform,
    batch_norm_forward,
    batch_norm_statistics,
    batch_norm_transform,
    update_running_statistics,
)
from .layers.batch_norm import BatchNorm

__all__ = [
    "BatchNorm",
    "BatchNormSaved",
    "Moments",
    "__version__",
    "batch_norm_backward",
    "batch_norm_backward_reduce",
    "batch_norm_backward_transform",
    "batch_norm_forward",
    "batch_norm_statistics",
    "batch_norm_transform",
    "get_num_threads",
    "is_available",
    "merge_moments",
    "set_num_threads",
    "show_config",
    "update_running_statistics",
]
