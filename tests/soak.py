"""Hard use, for as long as you like: `make soak`, or `python tests/soak.py --minutes 60 --seed 7`.

- Random calls of every public function, with arguments that are right and arguments that are not:
  each returns arrays like x, or raises a ValueError or a TypeError that names an argument; no other
  error, no warning; nothing is changed but what is meant to be, and by a call that raises nothing.
- Norms of random shapes, dtypes and memory orders, forward and backward, against the reference.
- Lives of layers: calls right and wrong, modes, states, copies; a twin that is only called right
  never differs.
- Eight threads at once, with layers of their own and one that all share.
- 100,000 calls, after which the process is as large as before.

A failure prints the number of the call that made it, which `--seed` and `--first` repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import os
import re
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # found from anywhere
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.path.insert(0, str(Path(__file__).parent))

from cases import DTYPES, accumulator, check, group, instance, layer, operands, rms, scale_shift

import cunorm

# --- random calls -------------------------------------------------------------------

#: Arguments that functions write to.
WRITTEN = ("out", "running_mean", "running_var")


def array(rng, shape, dtype):
    """Random numbers, lying in memory in some order, with gaps or backwards now and then."""
    order = rng.permutation(len(shape))
    values = rng.standard_normal(shape).astype(dtype)
    values = values.transpose(order).copy().transpose(np.argsort(order))
    kind = rng.integers(6)
    if kind == 0:
        wide = np.repeat(values, 2, axis=-1) if values.ndim else values
        return wide[..., ::2] if values.ndim else values
    return values[::-1] if kind == 1 and values.ndim else values


def some_shape(rng):
    ndim = rng.integers(2, 6)
    longest = {2: 60, 3: 20, 4: 9, 5: 5}[int(ndim)]
    return tuple(int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, longest + 1, ndim))


class Draw:
    """Arguments that belong together, of one x."""

    def __init__(self, rng):
        self.rng = rng
        self.dtype = DTYPES[rng.integers(4)]
        self.shape = some_shape(rng)
        self.axis = int(rng.integers(-len(self.shape) + 1, len(self.shape)))
        self.axis = self.axis or 1
        self.x, self.dy = self.like_x(), self.like_x()
        self.channels = self.shape[self.axis]

    def like_x(self):
        return array(self.rng, self.shape, self.dtype)

    def maybe(self, make):
        return make() if self.rng.random() < 0.6 else None

    def vector(self, *shape):
        kinds = [self.dtype, np.float64, accumulator(self.dtype)]
        return abs(array(self.rng, shape or (self.channels,), kinds[self.rng.integers(3)]))

    def affine(self, *shape):
        return {"weight": self.maybe(lambda: self.vector(*shape)),
                "bias": self.maybe(lambda: self.vector(*shape))}  # fmt: skip

    def running(self):
        return {"running_mean": self.vector(), "running_var": self.vector()}

    def out(self):
        return {"out": self.maybe(self.like_x)}


def batch_norm(d):
    arguments = {"x": d.x, **d.affine(), **d.running(), "training": bool(d.rng.integers(2)),
                 "eps": 1e-3, "channel_axis": d.axis}  # fmt: skip
    return arguments, cunorm.batch_norm_forward


def row_norm(d, function):
    shape = d.shape[d.axis :] if d.axis >= 0 else d.shape[len(d.shape) + d.axis :]
    affine = d.affine(*shape)
    if function is cunorm.rms_norm_forward:
        del affine["bias"]
    return {"x": d.x, **affine, "axis": d.axis, "eps": 1e-3}, function


def groups_of(d):
    whole = [n for n in range(1, d.channels + 1) if d.channels % n == 0] or [1]
    return int(d.rng.choice(whole))


def backward_of(d, made, function, **more):
    """Arguments of a backward function, after a call of its forward function."""
    arguments, forward = made
    _, saved = forward(**arguments)
    return {"dy": d.dy, "x": d.x, "saved": saved, "weight": arguments["weight"], **more}, function


def group_norm(d):
    arguments = {"x": d.x, "num_groups": groups_of(d), **d.affine(), "channel_axis": d.axis}
    return arguments, cunorm.group_norm_forward


def instance_norm(d):
    arguments = {"x": d.x, **d.affine(), **d.running(), "use_input_stats": bool(d.rng.integers(2)),
                 "channel_axis": d.axis}  # fmt: skip
    return arguments, cunorm.instance_norm_forward


def moments(d):
    parts = [cunorm.batch_norm_statistics(d.x, channel_axis=d.axis) for _ in range(3)]
    return {"moments": parts[: d.rng.integers(1, 4)]}, cunorm.merge_moments


def conv_batch_norm(d):
    """With images of its own."""
    groups, kernel = (int(n) for n in d.rng.integers(1, 4, 2))
    channels, features = (groups * int(n) for n in d.rng.integers(1, 4, 2))
    d.shape = (int(d.rng.integers(1, 5)), channels, *map(int, d.rng.integers(kernel, 9, 2)))
    d.x, d.channels = d.like_x(), features
    weight = array(d.rng, (features, channels // groups, kernel, kernel), d.dtype)
    return {"x": d.x, "conv_weight": weight, **d.affine(), **d.running(), "groups": groups,
            "padding": int(d.rng.integers(2)), "stride": int(d.rng.integers(1, 3)),
            "training": bool(d.rng.integers(2))}, cunorm.conv_batch_norm_forward  # fmt: skip


def conv_batch_norm_backward(d):
    arguments, forward = conv_batch_norm(d)
    y, saved = forward(**arguments)
    kept = {name: arguments[name] for name in ("x", "conv_weight", "weight")}
    dy = array(d.rng, y.shape, d.dtype)
    return {"dy": dy, "saved": saved, **kept, **mask(d, 4)}, cunorm.conv_batch_norm_backward


def mask(d, number):
    return {"output_mask": tuple(bool(b) for b in d.rng.integers(0, 2, number))}


CALLS = {
    "batch_norm_forward": lambda d: (batch_norm(d)[0] | d.out(), cunorm.batch_norm_forward),
    "batch_norm_backward": lambda d: backward_of(
        d, batch_norm(d), cunorm.batch_norm_backward, **mask(d, 3)
    ),
    "batch_norm_double_backward": lambda d: backward_of(
        d, batch_norm(d), cunorm.batch_norm_double_backward, gdx=d.maybe(d.like_x),
        gdweight=d.maybe(d.vector), gdbias=d.maybe(d.vector),
    ),
    "layer_norm_forward": lambda d: row_norm(d, cunorm.layer_norm_forward),
    "layer_norm_backward": lambda d: backward_of(
        d, row_norm(d, cunorm.layer_norm_forward), cunorm.layer_norm_backward, **mask(d, 3)
    ),
    "layer_norm_double_backward": lambda d: backward_of(
        d, row_norm(d, cunorm.layer_norm_forward), cunorm.layer_norm_double_backward,
        gdx=d.maybe(d.like_x), gdweight=None, gdbias=None,
    ),
    "rms_norm_forward": lambda d: row_norm(d, cunorm.rms_norm_forward),
    "rms_norm_backward": lambda d: backward_of(
        d, row_norm(d, cunorm.rms_norm_forward), cunorm.rms_norm_backward, **mask(d, 2)
    ),
    "group_norm_forward": lambda d: (group_norm(d)[0] | d.out(), cunorm.group_norm_forward),
    "group_norm_backward": lambda d: backward_of(
        d, group_norm(d), cunorm.group_norm_backward, **mask(d, 3)
    ),
    "instance_norm_forward": instance_norm,
    "instance_norm_backward": lambda d: backward_of(
        d, instance_norm(d), cunorm.instance_norm_backward, **mask(d, 3)
    ),
    "conv_batch_norm_forward": conv_batch_norm,
    "conv_batch_norm_backward": conv_batch_norm_backward,
    "merge_moments": moments,
    "scale_shift_forward": lambda d: (
        {"x": d.x, "scale": d.vector(), "shift": d.maybe(d.vector), "channel_axis": d.axis},
        cunorm.scale_shift_forward,
    ),
    "scale_shift_backward": lambda d: (
        {"dy": d.dy, "x": d.x, "scale": d.vector(), "channel_axis": d.axis, **mask(d, 3)},
        cunorm.scale_shift_backward,
    ),
    "batch_norm_statistics": lambda d: (
        {"x": d.x, "channel_axis": d.axis}, cunorm.batch_norm_statistics,
    ),
    "batch_norm_transform": lambda d: (
        {"x": d.x, "mean": d.vector(), "inv_std": d.vector(), **d.affine(),
         "channel_axis": d.axis, **d.out()},
        cunorm.batch_norm_transform,
    ),
    "batch_norm_backward_reduce": lambda d: (
        {"dy": d.dy, "x": d.x, "mean": d.vector(), "channel_axis": d.axis},
        cunorm.batch_norm_backward_reduce,
    ),
    "batch_norm_backward_transform": lambda d: (
        {"dy": d.dy, "x": d.x, "mean": d.vector(), "inv_std": d.vector(), "weight": None,
         "sum_dy": d.vector(), "sum_dy_xmu": d.vector(), "count": 7, "channel_axis": d.axis},
        cunorm.batch_norm_backward_transform,
    ),
    "update_running_statistics": lambda d: (
        {**d.running(), "mean": d.vector(), "var": d.vector(), "count": 7},
        cunorm.update_running_statistics,
    ),
    "fold_batch_norm": lambda d: (
        {"conv_weight": array(d.rng, (d.channels, 3, 2), d.dtype), "conv_bias": None,
         **d.affine(), **d.running()},
        cunorm.fold_batch_norm,
    ),
}  # fmt: skip


def junk(rng, value):
    """Something that is not, or may not be, what an argument should be."""
    choices = [
        None, "text", b"bytes", 3, -1, 0.5, -2.5, float("nan"), float("inf"), 10**30, True, [], {},
        [1.0, 2.0], (1, 2), object(), 1j, np.float32(2), np.zeros(()), np.zeros(0, np.float32),
        np.zeros((3, 4), np.int64), np.zeros((2, 3), complex), np.array(["a", "b"]),
        np.array([object()], object), np.zeros((4, 3), ">f4"), np.zeros((2, 2), np.longdouble),
        np.ma.masked_array(np.zeros((2, 3)), True), np.zeros((2, 3, 4), np.float32),
        np.broadcast_to(np.float32(1), (4, 3)), np.zeros((2**3, 0, 2**3), np.float64), len, np,
    ]  # fmt: skip
    if isinstance(value, np.ndarray) and value.ndim and value.dtype in DTYPES:
        read_only = value.view()
        read_only.flags.writeable = False
        choices += [value[:1], value[..., None], value.astype(np.int8), value.tolist(), read_only,
                    value.astype(np.float64), value.astype(np.float16), value.T] * 2  # fmt: skip
    return choices[rng.integers(len(choices))]


def copies(arguments):
    return {n: a.copy() for n, a in arguments.items() if isinstance(a, np.ndarray)}


def same(before, after):
    return np.array_equal(before, after, equal_nan=before.dtype.kind in "fc")


def one_call(rng):
    """One random call; its name and outcome."""
    name = list(CALLS)[rng.integers(len(CALLS))]
    drawn = Draw(rng)
    try:
        arguments, function = CALLS[name](drawn)
    except ValueError:  # one value a channel: there is no saved to go back with
        return name, "one value"
    spoilt = []
    if rng.random() < 0.5:
        for _ in range(rng.integers(1, 3)):
            spoilt.append(str(rng.choice(list(arguments))))
            arguments[spoilt[-1]] = junk(rng, arguments[spoilt[-1]])
    before = copies(arguments)
    refused = None
    try:
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            results = function(**arguments)
    except (ValueError, TypeError) as error:
        refused = str(error)
    if refused is not None:
        assert re.match(r"[a-z_.]+(\[.*?\][a-z_.]*)?: expected", refused), (
            f"names no argument: {refused}"
        )
        assert spoilt or "more than 1" in refused, f"refused: {refused}"
        for key, value in before.items():
            assert same(value, arguments[key]), f"{key} was changed by a call that raised"
        return name, "refused"
    for key, value in before.items():
        if key not in WRITTEN:
            assert same(value, arguments[key]), f"{key} was changed"
    first = results[0] if isinstance(results, tuple) else results
    if not spoilt and isinstance(first, np.ndarray) and "x" in arguments:
        large = [r for r in results if isinstance(r, np.ndarray) and r.shape == drawn.shape]
        if "statistics" not in name and "reduce" not in name:
            assert all(r.dtype == drawn.dtype for r in large if r.ndim > 1)
    return name, "done"


# --- lives of layers -------------------------------------------------------------------


def some_layer(rng):
    """A function that makes layers of one kind, and the shape of what they take."""
    n, c, length = (int(n) for n in rng.integers(2, 7, 3))
    options = {"dtype": DTYPES[rng.integers(4)]}
    tracking = options | {
        "affine": bool(rng.integers(2)),
        "track_running_statistics": bool(rng.integers(2)),
        "exponential_average_factor": [0.1, "cumulative"][rng.integers(2)],
    }
    makers = [
        lambda: cunorm.BatchNorm(c, **tracking),
        lambda: cunorm.InstanceNorm(c, **tracking),
        lambda: cunorm.GroupNorm(c, c, **options),
        lambda: cunorm.LayerNorm((c, length, length), **options),
        lambda: cunorm.RMSNorm(length, **options),
        lambda: cunorm.ScaleShift(c, **options),
        lambda: cunorm.ConvBatchNorm(c, 3, 2, rng=0, **tracking),
    ]
    return makers[rng.integers(len(makers))], (n, c, length, length), options["dtype"]


def state_of(layer):
    arrays = {**layer.state_dict(), **{f"d{n}": g for n, g in layer.gradients.items()}}
    return {n: (a.dtype, a.tobytes()) for n, a in arrays.items()}, layer.training, layer.frozen


def one_life(rng):
    """A layer is called right and wrong; a twin, only called right, never differs from it."""
    make, shape, dtype = some_layer(rng)
    layer, twin = make(), make()
    y = None

    def values(
        of_shape,
    ):  # dense: a copy of a layer has a copy of x, whose bits may depend on strides
        return rng.standard_normal(of_shape).astype(dtype)

    def both(name, *arguments, **options):
        results = [getattr(one, name)(*arguments, **options) for one in (layer, twin)]
        if isinstance(results[0], np.ndarray):
            assert results[0].tobytes() == results[1].tobytes()
        return results[0]

    def wrong(name, argument):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                getattr(copy.deepcopy(layer), name)(argument)
        except (ValueError, TypeError, RuntimeError):
            pass
        else:  # it was right after all
            return
        before = state_of(layer)
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            getattr(layer, name)(argument)
        assert state_of(layer) == before, f"{name} that raised has changed the layer"

    for _ in range(rng.integers(5, 25)):
        step = rng.integers(9)
        if step < 2:
            y = both("forward", values(shape))
        elif step == 2 and y is not None:
            both("backward", values(y.shape))
            y = None
        elif step == 3:
            wrong("forward", junk(rng, values(shape)))
        elif step == 4:
            wrong("backward", junk(rng, values(shape)))
        elif step == 5:
            state = layer.state_dict()
            if state:
                name = str(rng.choice(list(state)))
                wrong("load_state_dict", state | {name: junk(rng, state[name])})
        elif step == 6:
            modes = ["train", "eval", "unfreeze"]
            if not isinstance(layer, cunorm.BatchNorm) or layer.running_mean is not None:
                modes.append("freeze")
            both(str(rng.choice(modes)))
        elif step == 7:
            other = make()
            other.load_state_dict(layer.state_dict())
            both("load_state_dict", other.state_dict())
        else:
            layer = copy.deepcopy(layer)
        assert state_of(layer) == state_of(twin)


# --- the parts ------------------------------------------------------------------------


def repeated(seconds, seed, first, call):
    """Calls with a generator of their own each, until the time is over; how many."""
    end = time.monotonic() + seconds
    for number in itertools.count(first):
        if time.monotonic() > end and number > first:
            return number - first
        rng = np.random.default_rng([seed, number])
        try:
            call(rng)
        except BaseException:
            print(f"\ncall {number} of seed {seed}:", flush=True)
            raise
    raise AssertionError


def random_calls(seconds, seed, first=0):
    outcomes = {}

    def call(rng):
        name, outcome = one_call(rng)
        outcomes.setdefault(name, {}).setdefault(outcome, 0)
        outcomes[name][outcome] += 1

    number = repeated(seconds, seed, first, call)
    return f"{number} calls of {len(outcomes)} functions", outcomes


def against_the_reference(seconds, seed, first=0):
    def call(rng):
        shape = some_shape(rng)
        if 0 in shape:
            return
        axis = int(rng.integers(1, len(shape)))
        number = int(rng.choice([n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0]))
        cases = [layer(axis), rms(axis), scale_shift(False, axis), scale_shift(True, axis),
                 group(number, axis), instance(axis)]  # fmt: skip
        case = cases[rng.integers(len(cases))]
        if case.norm(shape).count == 1 and case.name.startswith(("group", "instance")):
            return
        x, dy, weight, bias = operands(rng, case, shape, DTYPES[rng.integers(4)])
        order = rng.permutation(len(shape))
        x = x.transpose(order).copy().transpose(np.argsort(order))
        check(case, x, dy, weight, bias)

    return f"{repeated(seconds, seed, first, call)} norms", None


def lives_of_layers(seconds, seed, first=0):
    return f"{repeated(seconds, seed, first, one_life)} layers", None


def threads_at_once(seconds, seed, _first=0):
    """Each thread gets the same bits from its own layer every time; the shared one stays whole."""
    shared = cunorm.BatchNorm(6, track_running_statistics=False)
    failures, calls = [], []
    end = time.monotonic() + seconds

    def work(index):
        try:
            rng = np.random.default_rng([seed, index])
            x, dy = rng.standard_normal((2, 20, 6, 30 + index), dtype=np.float32)
            own = cunorm.BatchNorm(6)
            expected = own.forward(x).copy(), own.backward(dy).copy()
            while index not in calls or time.monotonic() < end:  # one round at least
                assert np.array_equal(own.forward(x), expected[0])
                assert np.array_equal(own.backward(dy), expected[1])
                y = shared.forward(x)
                assert np.array_equal(y, expected[0])
                calls.append(index)
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    return f"{len(calls)} rounds of 8 threads", None


def resident():
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def no_leak(calls=100_000):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 5), dtype=np.float32)
    norm = cunorm.BatchNorm(6)

    def some(number):
        for _ in range(number):
            norm.backward(norm.forward(x))
            with contextlib.suppress(ValueError):
                norm.forward(x[:, :3])

    some(1000)
    gc.collect()
    before = resident()
    some(calls // 3)
    gc.collect()
    grown = resident() - before
    assert grown < 2 << 20, f"{calls} calls: {grown} bytes more"
    return f"{calls} calls: {grown / 1024:.0f} KiB more", None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="number of the call to begin with")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    seconds = options.minutes * 60
    parts = {
        random_calls: 0.4,
        lives_of_layers: 0.2,
        against_the_reference: 0.25,
        threads_at_once: 0.15,
    }
    for part, share in parts.items():
        result, outcomes = part(seconds * share, options.seed, options.first)
        print(f"{part.__name__.replace('_', ' ')}: {result}", flush=True)
        for name, counts in sorted((outcomes or {}).items()):
            print(f"    {name}: {', '.join(f'{n} {what}' for what, n in counts.items())}")
    print(f"no leak: {no_leak()[0]}")


if __name__ == "__main__":
    main()
