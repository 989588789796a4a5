"""All modules of this backend, and what Numba does before the first kernels.

To be imported where Ctrl-C does not come (`undisturbed`).
"""

from numba.core.registry import cpu_target

from . import backward, double_backward, statistics, tasks, transform

__all__ = ["backward", "double_backward", "statistics", "transform"]

# Numba takes in what has been registered once, from generators that would be lost for good.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

# What is compiled for helpers is needed in the middle of calls.
nobody = tasks.helpers(1)
tasks.serve(0)
tasks.ring(nobody.ctypes.data)
