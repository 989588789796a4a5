"""A critic whose gradient is held near 1: a gradient penalty, by hand, in NumPy.

The critic tells samples of two distributions in the plane apart. It is trained as in Gulrajani
et al., "Improved Training of Wasserstein GANs" (2017): to the difference of its mean scores is
added 10 times the mean of (|gradient| - 1)^2, the gradient being that of the score with respect
to the input, at points between the samples. So training differentiates a gradient, here through
a layer norm (their choice, since it does not mix samples): `cunorm.layer_norm_double_backward`.

    python examples/gradient_penalty.py [--steps 400]
"""

from __future__ import annotations

import argparse

import numpy as np

import cunorm

HIDDEN, PENALTY = 64, 10.0


def new_critic(rng):
    """Parameters of score = w2 . tanh(layer_norm(x w1 + b1))."""
    return {
        "w1": rng.standard_normal((2, HIDDEN)) / np.sqrt(2),
        "b1": rng.standard_normal(HIDDEN),
        "weight": np.ones(HIDDEN),
        "bias": 0.1 * rng.standard_normal(HIDDEN),
        "w2": rng.standard_normal(HIDDEN) / np.sqrt(HIDDEN),
    }


def forward(critic, x):
    """Scores, and what the passes back need."""
    h = x @ critic["w1"] + critic["b1"]
    y, saved = cunorm.layer_norm_forward(h, critic["weight"], critic["bias"], eps=1e-2)
    a = np.tanh(y)
    return a @ critic["w2"], (x, h, saved, a)


def backward(critic, kept, dscores):
    """Gradients with respect to the parameters."""
    x, h, saved, a = kept
    dy = dscores[:, None] * critic["w2"] * (1 - a**2)
    dh, dweight, dbias = cunorm.layer_norm_backward(dy, h, saved, critic["weight"])
    return {
        "w1": x.T @ dh,
        "b1": dh.sum(axis=0),
        "weight": dweight,
        "bias": dbias,
        "w2": a.T @ dscores,
    }


def penalty(critic, x):
    """(mean of (|gradient| - 1)^2, its gradients with respect to the parameters, mean |gradient|).

    The gradient of each score with respect to its x is a computation like any other, and
    below it every step of that computation is taken back.
    """
    _, (x, h, saved, a) = forward(critic, x)
    w1, w2, weight = critic["w1"], critic["w2"], critic["weight"]
    slope = 1 - a**2  # of tanh
    dy = w2 * slope
    dh, _, _ = cunorm.layer_norm_backward(dy, h, saved, weight, output_mask=(True, False, False))
    dx = dh @ w1.T
    norm = np.sqrt((dx**2).sum(axis=1, keepdims=True))
    value = ((norm - 1) ** 2).mean()

    gdx = 2 * (norm - 1) * dx / norm / len(x)
    gradients = {"w1": gdx.T @ dh}
    gdy, gh, gradients["weight"] = cunorm.layer_norm_double_backward(
        gdx @ w1, None, None, dy, h, saved, weight
    )
    gradients["w2"] = (gdy * slope).sum(axis=0)
    ga = gdy * w2 * (-2 * a)
    # a and h depend on the parameters too, as in any pass back
    dh, dweight, gradients["bias"] = cunorm.layer_norm_backward(ga * slope, h, saved, weight)
    gradients["weight"] += dweight
    gradients["w1"] += x.T @ (gh + dh)
    gradients["b1"] = (gh + dh).sum(axis=0)
    return value, gradients, float(norm.mean())


def loss_and_gradients(critic, real, fake, between):
    """Loss of the critic, its gradients, and the mean length of the scores' gradients."""
    loss, gradients = 0.0, {name: np.zeros_like(array) for name, array in critic.items()}
    for samples, sign in ((real, -1.0), (fake, 1.0)):
        scores, kept = forward(critic, samples)
        loss += sign * scores.mean()
        found = backward(critic, kept, np.full(len(samples), sign / len(samples)))
        for name in critic:
            gradients[name] += found[name]
    value, found, length = penalty(critic, between)
    for name in critic:
        gradients[name] += PENALTY * found[name]
    return loss + PENALTY * value, gradients, length


def batch(rng, number=128):
    """Samples of a ring, of a spot beside it, and points between the two."""
    angle = rng.uniform(0, 2 * np.pi, number)
    real = np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.05 * rng.standard_normal(
        (number, 2)
    )
    fake = 0.3 * rng.standard_normal((number, 2)) + [2.0, 0.0]
    share = rng.uniform(size=(number, 1))
    return real, fake, share * real + (1 - share) * fake


def largest_difference(critic, samples, step=1e-6):
    """Between the gradients and differences of the loss, one number of each parameter."""
    _, gradients, _ = loss_and_gradients(critic, *samples)
    worst = 0.0
    for name, array in critic.items():
        place = np.unravel_index(np.abs(gradients[name]).argmax(), array.shape)
        values = []
        for sign in (1, -1):
            changed = {key: value.copy() for key, value in critic.items()}
            changed[name][place] += sign * step
            values.append(loss_and_gradients(changed, *samples)[0])
        expected = (values[0] - values[1]) / (2 * step)
        worst = max(worst, abs(gradients[name][place] - expected))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    critic = new_critic(rng)
    error = largest_difference(critic, batch(rng))
    print(f"largest difference between gradients and differences of the loss: {error:.1e}\n")
    print("step      loss   mean |gradient|")
    mean, square = ({name: np.zeros_like(a) for name, a in critic.items()} for _ in range(2))
    for step in range(options.steps):
        loss, gradients, length = loss_and_gradients(critic, *batch(rng))
        for name, array in critic.items():  # Adam (Kingma and Ba, 2014)
            mean[name] += 0.1 * (gradients[name] - mean[name])
            square[name] += 0.01 * (gradients[name] ** 2 - square[name])
            size = np.sqrt(square[name] / (1 - 0.99 ** (step + 1))) + 1e-8
            array -= 0.003 * mean[name] / (1 - 0.9 ** (step + 1)) / size
        if step in (0, 9, 49) or step == options.steps - 1 or (step + 1) % 100 == 0:
            print(f"{step + 1:4}{loss:10.4f}{length:18.3f}")


if __name__ == "__main__":
    main()
