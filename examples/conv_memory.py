"""What a convolution with batch norm keeps between the passes, as one layer and as two.

A network of two convolutions (3 x 3, 32 and 64 channels), each with batch norm and ReLU behind
it, is trained on handwritten digits: once with a layer for the convolution, which keeps its
input, and one for the batch norm, which keeps the convolution's result; once with
`cunorm.ConvBatchNorm`, which keeps the input alone and convolves again in backward. Printed are
the losses, which are the same to the bit or to rounding, and the memory: after forward, and the
most at any time of a step. On the CPU it is counted by tracemalloc, on a GPU by CuPy's pool.

    python examples/conv_memory.py [--batch-size 128] [--steps 10]

It needs cunorm with its examples' requirements: pip install "cunorm[examples]".
"""

from __future__ import annotations

import argparse
import tracemalloc

import numpy as np
from train_digits import (
    Dense,
    Layer,
    Momentum,
    backward,
    cross_entropy,
    device,
    digits,
    forward,
    xp,
)

import cunorm

# Tiles of up to 64 MiB, the default, would be larger than all else in so small a network, and
# the peak that of the convolutions alone.
CONVOLUTION = cunorm.MatmulConvolution(workspace_limit=1 << 20)
OPTIONS = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


class Convolution(Layer):
    """3 x 3 convolution that keeps height and width, and its input for backward."""

    def __init__(self, weight):
        super().__init__()
        self.parameters["conv_weight"] = weight

    def forward(self, x):
        self.x = x
        return CONVOLUTION.forward(x, self.parameters["conv_weight"], **OPTIONS)

    def backward(self, dy):
        x, weight = self.x, self.parameters["conv_weight"]
        del self.x
        self.gradients["conv_weight"] = CONVOLUTION.backward_weight(dy, x, weight, **OPTIONS)
        return CONVOLUTION.backward_input(dy, weight, x, **OPTIONS)


class ReLU(Layer):
    """In place: what it keeps is the next layer's input."""

    def forward(self, x):
        self.y = xp.maximum(x, 0, out=x)
        return self.y

    def backward(self, dy):
        y = self.y
        del self.y
        return xp.multiply(dy, y > 0, out=dy)


class Average(Layer):
    """Mean over height and width."""

    def forward(self, x):
        self.shape = x.shape
        return x.mean(axis=(2, 3))

    def backward(self, dy):
        _, _, h, w = self.shape
        return xp.broadcast_to(dy[:, :, None, None] / (h * w), self.shape).copy()


def network(fused):
    """The same numbers in both networks."""
    layers = []
    for number, (in_channels, out_channels) in enumerate([(1, 32), (32, 64)]):
        layer = cunorm.ConvBatchNorm(
            in_channels, out_channels, 3, padding=1, convolution=CONVOLUTION, rng=number
        ).to(device)
        if fused:
            layers.append(layer)
        else:
            layers.append(Convolution(layer.conv_weight))
            layers.append(cunorm.BatchNorm(out_channels).to(device))
        layers.append(ReLU())
    return [*layers, Average(), Dense(np.random.default_rng(2), 64, 10)]


class Memory:
    """Bytes in use, and the most since `begin`."""

    def begin(self):
        if xp is np:
            tracemalloc.start()
        else:
            self._pool = xp.get_default_memory_pool()
            self._pool.free_all_blocks()
            self._before = self._pool.used_bytes()

    def now(self):
        return tracemalloc.get_traced_memory()[0] if xp is np else self._used(self._pool.used_bytes)

    def end(self):
        """The most; on a GPU what the pool has taken, which is a little more."""
        if xp is not np:
            return self._used(self._pool.total_bytes)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    def _used(self, number):
        return number() - self._before


def train(layers, images, labels, steps, batch_size):
    """(losses, bytes after forward, most bytes) of so many steps; the last one is measured."""
    optimizer, memory = Momentum(layers), Memory()
    rng = np.random.default_rng(3)
    losses = []
    for step in range(steps):
        batch = rng.permutation(len(images))[:batch_size]
        x, wanted = images[batch], labels[batch]
        if step == steps - 1:
            memory.begin()
        scores = forward(layers, x)
        if step == steps - 1:
            after = memory.now()
        loss, dscores = cross_entropy(scores, wanted)
        backward(layers, dscores)
        losses.append(loss)
        if step == steps - 1:
            most = memory.end()
        optimizer.step(0.05)
    return np.array(losses), after, most


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--batch-size", type=int, default=128, choices=range(2, 1025), metavar="2..1024"
    )
    parser.add_argument("--steps", type=int, default=10, choices=range(1, 101), metavar="1..100")
    options = parser.parse_args()
    (images, _), (labels, _) = digits(np.random.default_rng(0))
    found = {
        name: train(network(fused), images, labels, options.steps, options.batch_size)
        for name, fused in {"two layers": False, "one layer": True}.items()
    }
    results = [options.batch_size * channels * 8 * 8 * 4 for channels in (32, 64)]
    print(f"batches of {options.batch_size}; the convolutions' results have "
          f"{results[0] / 1e6:.2f} and {results[1] / 1e6:.2f} MB\n")  # fmt: skip
    print("            loss, first    last   after forward   most in a step")
    for name, (losses, after, most) in found.items():
        ends = f"{losses[0]:11.6f}{losses[-1]:8.4f}"
        print(f"{name:10}  {ends}{after / 1e6:13.2f} MB{most / 1e6:14.2f} MB")
    (plain, *kept), (fused, *less) = found.values()
    print(f"{'less':10}  {'':19}{(kept[0] - less[0]) / 1e6:13.2f} MB"
          f"{(kept[1] - less[1]) / 1e6:14.2f} MB")  # fmt: skip
    print(f"\nlargest difference of losses: {np.abs(plain - fused).max():.1e}")


if __name__ == "__main__":
    main()
