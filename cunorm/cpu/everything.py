"""All modules of this backend, and what Numba does before its first kernel.

To be imported where Ctrl-C does not come (`arrays.cpu_backend`).
"""

from numba.core.registry import cpu_target

from . import backward, double_backward, statistics, transform

__all__ = ["backward", "double_backward", "statistics", "transform"]

# Numba takes in what has been registered once, from generators that would be lost for good.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
