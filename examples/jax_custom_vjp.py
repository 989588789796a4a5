"""cunorm's layer norm in JAX: a function with its own gradient, also where it is compiled.

JAX compiles what it traces; `jax.pure_callback` runs cunorm on the CPU in the midst of that.

    python examples/jax_custom_vjp.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import cunorm


@jax.custom_vjp
def layer_norm(x, weight, bias):
    """Over the last axis of x."""
    return forward(x, weight, bias)[0]


def forward(x, weight, bias):
    def compute(*arrays):
        y, saved = cunorm.layer_norm_forward(*arrays)
        return y, saved.mean, saved.inv_std, saved.residual

    statistic = jax.ShapeDtypeStruct(x.shape[:-1], jnp.promote_types(x.dtype, jnp.float32))
    results = jax.typeof(x), statistic, statistic, statistic
    y, *statistics = jax.pure_callback(compute, results, x, weight, bias, vmap_method="sequential")
    return y, (x, weight, bias, *statistics)


def backward(kept, dy):
    def compute(dy, x, weight, bias, *statistics):
        saved = cunorm.LayerNormSaved(*statistics, x.ndim - 1, x.shape, bias.dtype)
        return cunorm.layer_norm_backward(dy, x, saved, weight)

    results = tuple(map(jax.typeof, kept[:3]))
    return jax.pure_callback(compute, results, dy, *kept, vmap_method="sequential")


layer_norm.defvjp(forward, backward)


def main():
    def own(x, weight, bias):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight + bias

    x, target = jax.random.normal(jax.random.key(0), (2, 64, 48))
    losses = [lambda *a, f=f: ((f(*a) - target) ** 2).mean() for f in (layer_norm, own)]
    gradients = [jax.jit(jax.grad(f, (0, 1, 2)))(x, jnp.ones(48), jnp.zeros(48)) for f in losses]
    for name, a, b in zip(("x", "weight", "bias"), *gradients, strict=True):
        print(f"gradient of {name}: largest difference from JAX's own {jnp.abs(a - b).max():.1e}")


if __name__ == "__main__":
    main()
