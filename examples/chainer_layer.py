"""Chainer's style around cunorm: a function that knows its way back, and variables that walk it.

Chainer itself is not needed; `Variable` below is its idea in a few lines.

    python examples/chainer_layer.py
"""

from __future__ import annotations

import numpy as np

import cunorm


class Variable:
    """An array, its gradient, and the function that made it."""

    def __init__(self, array, creator=None):
        self.array, self.grad, self.creator = array, None, creator

    def backward(self):
        function, gradient = self.creator, self.grad
        while function is not None:
            for variable, grad in zip(function.inputs, function.backward(gradient), strict=True):
                variable.grad = grad if variable.grad is None else variable.grad + grad
            function, gradient = function.inputs[0].creator, function.inputs[0].grad


class BatchNormalization:
    """One call of chainer.functions.batch_normalization; running statistics keep decay."""

    def __init__(self, running_mean, running_var, eps=2e-5, decay=0.9):
        self.running, self.options = (running_mean, running_var), {"eps": eps, "momentum": decay}

    def __call__(self, x, gamma, beta):
        self.inputs = x, gamma, beta
        arrays = (v.array for v in self.inputs)
        y, self.saved = cunorm.batch_norm_forward(*arrays, *self.running, **self.options)
        return Variable(y, self)

    def backward(self, gradient):
        x, gamma, _ = self.inputs
        return cunorm.batch_norm_backward(gradient, x.array, self.saved, gamma.array)


def main():
    rng = np.random.default_rng(0)
    x = Variable(rng.standard_normal((100, 4), dtype=np.float32) * 3 + 5)
    gamma, beta = Variable(np.ones(4, np.float32)), Variable(np.zeros(4, np.float32))
    running = np.zeros(4, np.float32), np.ones(4, np.float32)
    y = BatchNormalization(*running)(x, gamma, beta)
    y.grad = y.array  # of half the sum of squares
    y.backward()
    print(f"standard deviation {y.array.std(0).round(3)}; running mean {running[0].round(3)}")
    print(f"gradient of gamma {gamma.grad.round(3)}, of x at most {abs(x.grad).max():.0e}")


if __name__ == "__main__":
    main()
