"""A training step on a GPU, captured once in a CUDA graph and replayed: no Python in between.

What the step allocates comes from a memory pool of the graph's own; nothing else may get it.

    python examples/cuda_graph.py
"""

from __future__ import annotations

import cupy as cp

import cunorm


class Step:
    """One of least squares through a batch norm, in arrays that stay where they are."""

    def __init__(self, x, target, rate=0.05):
        self.x, self.target, self.rate = x, target, rate
        self.weight, self.bias = cp.ones(x.shape[1], "float32"), cp.zeros(x.shape[1], "float32")
        self.running = cp.zeros(x.shape[1], "float32"), cp.ones(x.shape[1], "float32")
        self.y, self.loss = cp.empty_like(x), cp.zeros((), "float32")

    def __call__(self):
        _, saved = cunorm.batch_norm_forward(
            self.x, self.weight, self.bias, *self.running, out=self.y
        )
        cp.subtract(self.y, self.target, out=self.y)
        cp.mean(self.y * self.y, out=self.loss)
        _, dweight, dbias = cunorm.batch_norm_backward(
            self.y, self.x, saved, self.weight, output_mask=(False, True, True)
        )
        self.weight -= self.rate * dweight / len(self.x)
        self.bias -= self.rate * dbias / len(self.x)


def capture(step):
    """The graph of a step, the stream to launch it on, and the pool to keep with it."""
    cp.cuda.get_current_stream().synchronize()  # its arrays may not be ready
    pool, stream = cp.cuda.MemoryPool(), cp.cuda.Stream(non_blocking=True)
    with cp.cuda.using_allocator(pool.malloc), stream:
        step()  # compiles the kernels, and fills the pool
        stream.begin_capture()
        step()
        return stream.end_capture(), stream, pool


def main():
    step = Step(x := cp.random.standard_normal((4096, 64), dtype="float32"), 3 * x + 2)
    graph, stream, _pool = capture(step)
    for number in range(101):
        graph.launch(stream)
        if number % 20 == 0:
            stream.synchronize()
            print(f"step {number:3}: loss {float(step.loss):.6f}")


if __name__ == "__main__":
    main()
