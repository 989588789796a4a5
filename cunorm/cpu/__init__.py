"""The CPU backend: Numba kernels, vectorized by LLVM, run in threads of our own."""
