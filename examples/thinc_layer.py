"""A thinc model around cunorm's batch norm: `forward` returns the way back with the result.

python examples/thinc_layer.py
"""

from __future__ import annotations

import numpy as np
from thinc.api import Adam, Linear, Model, Relu, chain, fix_random_seed

import cunorm


def BatchNorm(width: int) -> Model:  # noqa: N802 - as thinc names its layers
    """Over all axes of X but the last; running statistics are among the model's attributes."""
    return Model(
        "batch_norm",
        forward,
        dims={"nO": width, "nI": width},
        params={"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)},
        attrs={"mean": np.zeros(width, np.float32), "var": np.ones(width, np.float32)},
    )


def forward(model, X, is_train):  # noqa: N803
    weight, bias = model.get_param("weight"), model.get_param("bias")
    for name in ("mean", "var"):  # read-only after `from_bytes`
        model.attrs[name] = np.require(model.attrs[name], requirements="W")
    parameters = weight, bias, model.attrs["mean"], model.attrs["var"]
    y, saved = cunorm.batch_norm_forward(X, *parameters, training=is_train, channel_axis=-1)

    def backprop(dy):
        dx, dweight, dbias = cunorm.batch_norm_backward(dy, X, saved, weight)
        model.inc_grad("weight", dweight)
        model.inc_grad("bias", dbias)
        return dx

    return y, backprop


def main():
    fix_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 8), dtype=np.float32)
    target = np.sin(3 * x[:, :1]) * x[:, 1:2]
    model = chain(Linear(64, 8), BatchNorm(64), Relu(64, 64), BatchNorm(64), Linear(1, 64))
    model.initialize(X=x)
    optimizer = Adam(0.01)
    for step in range(201):
        y, backprop = model.begin_update(x)
        backprop((y - target) / len(x))
        model.finish_update(optimizer)
        if step % 50 == 0:
            print(f"step {step:3}: loss {np.square(y - target).mean():.4f}")


if __name__ == "__main__":
    main()
