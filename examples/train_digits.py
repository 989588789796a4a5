"""Train a small convolutional network on handwritten digits, with and without batch norm.

A plain training loop: a list of layers, forward through all of them, backward
through all of them, one step of stochastic gradient descent. `cunorm.BatchNorm`
is a layer like the others. Arrays are NumPy's, or CuPy's where cunorm finds a
GPU; nothing else in this file knows the difference.

    python examples/train_digits.py [--epochs 12] [--plot digits.png]

It needs cunorm with its examples' requirements: pip install "cunorm[examples]".
"""

from __future__ import annotations

import argparse
import importlib

import matplotlib

matplotlib.use("Agg")  # draws into a file, needs no screen

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import cunorm

xp = importlib.import_module("cupy" if cunorm.is_available("cuda") else "numpy")
device = "cpu" if xp is np else "cuda"


# --- layers: forward, backward, parameters, gradients --------------------------


class Layer:
    """A layer without parameters, the same in training and inference."""

    def __init__(self):
        self.parameters, self.gradients = {}, {}

    def train(self):
        return self

    def eval(self):
        return self


class Convolution(Layer):
    """3 x 3 convolution that keeps height and width; x is (N, C, H, W)."""

    def __init__(self, rng, in_channels, out_channels):
        super().__init__()
        std = np.sqrt(2 / (9 * in_channels))  # He et al., 2015
        weight = std * rng.standard_normal((out_channels, in_channels, 3, 3))
        self.parameters["weight"] = xp.asarray(weight, xp.float32)

    def forward(self, x):
        self.windows = windows_of(x)
        return correlate(self.windows, self.parameters["weight"])

    def backward(self, dy):
        dweight = xp.tensordot(dy, self.windows, axes=((0, 2, 3), (0, 2, 3)))
        self.gradients["weight"] = dweight
        flipped = self.parameters["weight"][:, :, ::-1, ::-1].swapaxes(0, 1)
        return correlate(windows_of(dy), flipped)


def windows_of(x):
    """Every 3 x 3 window of zero-padded images: (N, C, H, W, 3, 3), without a copy."""
    padded = xp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return xp.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))


def correlate(windows, weight):
    """Sum of the windows' products with every output channel's weight: (N, O, H, W)."""
    return xp.moveaxis(xp.tensordot(windows, weight, axes=((1, 4, 5), (1, 2, 3))), -1, 1)


class ReLU(Layer):
    def forward(self, x):
        self.positive = x > 0
        return x * self.positive

    def backward(self, dy):
        return dy * self.positive


class AveragePool(Layer):
    """Means of 2 x 2 blocks."""

    def forward(self, x):
        n, c, h, w = x.shape
        return x.reshape(n, c, h // 2, 2, w // 2, 2).mean(axis=(3, 5))

    def backward(self, dy):
        return xp.repeat(xp.repeat(dy / 4, 2, axis=2), 2, axis=3)


class Dense(Layer):
    def __init__(self, rng, in_features, out_features):
        super().__init__()
        weight = np.sqrt(1 / in_features) * rng.standard_normal((in_features, out_features))
        self.parameters["weight"] = xp.asarray(weight, xp.float32)
        self.parameters["bias"] = xp.zeros(out_features, xp.float32)

    def forward(self, x):
        self.shape, self.flat = x.shape, x.reshape(len(x), -1)
        return self.flat @ self.parameters["weight"] + self.parameters["bias"]

    def backward(self, dy):
        self.gradients = {"weight": self.flat.T @ dy, "bias": dy.sum(axis=0)}
        return (dy @ self.parameters["weight"].T).reshape(self.shape)


def network(rng, batch_norm):
    """Five convolutions, each with or without a batch norm behind it, and a classifier."""
    layers = []
    for in_channels, out_channels, pool in [
        (1, 16, False),
        (16, 16, True),
        (16, 32, False),
        (32, 32, True),
        (32, 64, True),
    ]:
        layers.append(Convolution(rng, in_channels, out_channels))
        if batch_norm:
            layers.append(cunorm.BatchNorm(out_channels).to(device))
        layers.append(ReLU())
        if pool:
            layers.append(AveragePool())
    return [*layers, Dense(rng, 64, 10)]


# --- training ------------------------------------------------------------------


def forward(layers, x):
    for layer in layers:
        x = layer.forward(x)
    return x


def backward(layers, dy):
    for layer in reversed(layers):
        dy = layer.backward(dy)


def cross_entropy(scores, labels):
    """Mean loss, and its gradient with respect to the scores."""
    scores = scores - scores.max(axis=1, keepdims=True)
    probabilities = xp.exp(scores)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = xp.arange(len(labels))
    loss = -xp.log(probabilities[rows, labels]).mean()
    probabilities[rows, labels] -= 1
    return float(loss), probabilities / len(labels)


class Momentum:
    """Stochastic gradient descent with momentum."""

    def __init__(self, layers, decay=0.9):
        self.layers, self.decay = layers, decay
        self.velocities = [
            {name: xp.zeros_like(p) for name, p in layer.parameters.items()} for layer in layers
        ]

    def step(self, learning_rate):
        for layer, velocities in zip(self.layers, self.velocities, strict=True):
            for name, parameter in layer.parameters.items():
                velocity = velocities[name]
                velocity *= self.decay
                velocity -= learning_rate * layer.gradients[name]
                parameter += velocity


def train(layers, images, labels, *, epochs, batch_size, learning_rate, rng, description):
    """Train in place, the learning rate falling linearly to 0; the loss of every step."""
    optimizer = Momentum(layers)
    for layer in layers:
        layer.train()
    losses = []
    steps = len(images) // batch_size
    with tqdm(total=epochs * steps, desc=description, unit="step") as progress:
        for _ in range(epochs):
            order = rng.permutation(len(images))[: steps * batch_size].reshape(steps, batch_size)
            for batch in order:
                loss, dscores = cross_entropy(forward(layers, images[batch]), labels[batch])
                backward(layers, dscores)
                optimizer.step(learning_rate * (1 - len(losses) / (epochs * steps)))
                losses.append(loss)
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
                progress.update()
    return losses


def accuracy(layers, images, labels):
    """Share of images classified rightly, in inference."""
    for layer in layers:
        layer.eval()
    return float((forward(layers, images).argmax(axis=1) == labels).mean())


def digits(rng):
    """Images (N, 1, 8, 8) from 0 to 1 and their labels, as (training, test) pairs."""
    data = load_digits()
    order = rng.permutation(len(data.target))
    images = xp.asarray(data.images[order, None] / 16, xp.float32)
    labels = xp.asarray(data.target[order])
    return (images[:1437], images[1437:]), (labels[:1437], labels[1437:])


def plot(curves, path):
    """Loss of every step, and its mean over 20 steps, one color a network."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, losses in curves.items():
        window = min(20, len(losses))
        (line,) = axes.plot(losses, alpha=0.2, linewidth=0.8)
        smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(np.arange(window - 1, len(losses)), smooth, color=line.get_color(), label=name)
    axes.set(xlabel="step", ylabel="cross entropy, and its mean over 20 steps", yscale="log")
    axes.set_title("Training on 8 x 8 digits")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12, choices=range(1, 1001), metavar="1..1000")
    parser.add_argument(
        "--batch-size", type=int, default=32, choices=range(2, 513), metavar="2..512"
    )
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--plot", default="digits.png", help="where the loss curves go")
    options = parser.parse_args()

    cunorm.show_config()
    (images, test_images), (labels, test_labels) = digits(np.random.default_rng(0))
    print("compiling kernels, once on a machine ...")
    rehearsal = network(np.random.default_rng(0), batch_norm=True)
    backward(rehearsal, forward(rehearsal, images[:32]))

    curves, accuracies = {}, {}
    for name, batch_norm in {"with batch norm": True, "without batch norm": False}.items():
        rng = np.random.default_rng(1)  # both networks begin alike and see the same batches
        layers = network(rng, batch_norm)
        curves[name] = train(
            layers,
            images,
            labels,
            epochs=options.epochs,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            rng=rng,
            description=f"{name:>18}",
        )
        accuracies[name] = accuracy(layers, test_images, test_labels)
    for name, value in accuracies.items():
        print(f"test accuracy {name:<18}  {value:.2%}")
    plot(curves, options.plot)
    print(f"loss curves in {options.plot}")


if __name__ == "__main__":
    main()
