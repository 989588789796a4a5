"""The CUDA backend: kernels in ``kernels/``, launched through CuPy."""
