"""A little of `make soak`, always the same."""

from collections import deque

import numpy as np
import pytest
import soak


def test_random_calls():
    outcomes = [soak.one_call(np.random.default_rng([0, number])) for number in range(200)]
    assert {name for name, _ in outcomes} == set(soak.CALLS)
    made = [outcome for _, outcome in outcomes]
    assert made.count("done") > 75
    assert made.count("refused") > 50


def test_what_is_changed_is_found(monkeypatch):
    """A function that writes to its input, one that only half refuses, and a bare error."""
    import cunorm

    def spoil(x, **_):
        x[...] = 0
        return x

    def half(x, **_):
        x[...] = 0
        raise ValueError("x: expected more than 1")

    def bare(**_):
        raise ValueError("no")

    for function, message in (
        (spoil, "x was changed"),
        (half, "x was changed"),
        (bare, "names no"),
    ):
        monkeypatch.setattr(cunorm, "batch_norm_statistics", function)
        call = {"statistics": lambda d: ({"x": d.x}, cunorm.batch_norm_statistics)}
        monkeypatch.setattr(soak, "CALLS", call)
        with pytest.raises(AssertionError, match=message):
            deque(map(soak.one_call, map(np.random.default_rng, range(20))))


def test_lives_of_layers():
    for number in range(60):
        soak.one_life(np.random.default_rng([0, number]))


def test_layer_that_half_refuses_is_found(monkeypatch):
    import cunorm

    forward = cunorm.ScaleShift.forward

    def spoil(self, x):
        self.weight += not isinstance(x, np.ndarray)
        return forward(self, x)

    monkeypatch.setattr(cunorm.ScaleShift, "forward", spoil)
    monkeypatch.setattr(soak, "some_layer", lambda _: (lambda: cunorm.ScaleShift(3), (2, 3), "f4"))
    with pytest.raises(AssertionError, match="has changed the layer"):
        deque(map(soak.one_life, map(np.random.default_rng, range(50))))


def test_against_the_reference():
    soak.against_the_reference(5, seed=0)


def test_threads():
    soak.threads_at_once(3, seed=0)


def test_no_leak():
    soak.no_leak(20_000)
