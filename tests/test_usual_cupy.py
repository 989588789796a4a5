"""Usual CuPy arrays take a short way too: which do, with a stand-in for the driver."""

import itertools

import numpy as np
import pytest

import cunorm
from cunorm import arrays, checks
from cunorm.cuda import source
from cunorm.cuda.launch import Device

pytestmark = pytest.mark.cpu


class LongWayError(Exception):
    """What `adopt` raises here."""


class Driver:
    """CuPy itself, whose arrays lie in no memory and whose kernels do nothing."""

    def __init__(self, cupy):
        self.cupy = cupy
        self.addresses = itertools.count(1 << 40, 1 << 24)
        self.launched = []

    def allocate(self, size, device=0):
        memory = self.cupy.cuda.UnownedMemory(next(self.addresses), size, None, device)
        return self.cupy.cuda.MemoryPointer(memory, 0)

    def array(self, *shape, dtype=np.float32, device=0, kind=None, offset=0):
        kind = kind or self.cupy.ndarray
        return kind(shape, dtype, self.allocate(1 << 20, device) + offset)

    def launch(self, _file, name, *_):
        self.launched.append(name)


@pytest.fixture
def driver(monkeypatch):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    driver = Driver(cupy)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(source, "device", lambda: Device(90, 132, 227 << 10, 228 << 10, 60 << 20))
    monkeypatch.setattr(source, "launch", driver.launch)
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(driver.allocate)
    yield driver
    cupy.cuda.set_allocator(before)


@pytest.fixture
def short_way_only(monkeypatch):
    def adopt(*_):
        raise LongWayError

    monkeypatch.setattr(arrays, "adopt", adopt)


def calls(driver, dtype):
    """Pairs of calls, forward and backward, of every norm."""
    wide = np.float64 if dtype == np.float64 else np.float32
    x, dy = driver.array(6, 4, 5, dtype=dtype), driver.array(6, 4, 5, dtype=dtype)
    weight, bias, mean, var = (driver.array(4, dtype=wide) for _ in range(4))
    narrow, rows = driver.array(4, dtype=dtype), driver.array(5, dtype=wide)
    of_samples = driver.array(6, 4, dtype=wide)
    for arguments, options in (
        ((weight, bias, mean, var), {}),
        ((weight, None, mean, var), {"training": False}),
        ((), {}),
        ((None, bias), {"out": x}),
        ((narrow, narrow, mean, var), {}),
    ):
        yield (
            lambda a=arguments, o=options: cunorm.batch_norm_forward(x, *a, **o),
            lambda saved, a=arguments: cunorm.batch_norm_backward(dy, x, saved, *a[:1], out=dy),
        )
    for forward, backward, arguments in (
        (cunorm.layer_norm_forward, cunorm.layer_norm_backward, (rows, rows)),
        (cunorm.rms_norm_forward, cunorm.rms_norm_backward, (rows,)),
        (cunorm.instance_norm_forward, cunorm.instance_norm_backward, (weight, bias)),
    ):
        yield (
            lambda f=forward, a=arguments: f(x, *a),
            lambda saved, b=backward, a=arguments: b(dy, x, saved, *a[:1]),
        )
    yield (
        lambda: cunorm.group_norm_forward(x, 2, weight, bias),
        lambda saved: cunorm.group_norm_backward(dy, x, saved, weight),
    )
    for scale in (weight, of_samples):
        yield (
            lambda s=scale: (cunorm.scale_shift_forward(x, s, s), None),
            lambda _, s=scale: cunorm.scale_shift_backward(dy, x, s),
        )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
def test_same_launches(driver, monkeypatch, dtype):
    """Either way the same kernels are launched, and the results have the same shapes and types."""
    found = []
    for short in (True, False):
        with monkeypatch.context() as patch:
            if short:
                patch.setattr(arrays, "adopt", None)
            else:
                patch.setattr(checks, "are_usual", lambda *_, **__: False)
                patch.setattr(checks, "are_usual_in_backward", lambda *_, **__: False)
            driver.launched.clear()
            results = []
            for forward, backward in calls(driver, dtype):
                y, saved = forward()
                results += [y, *(saved or ()), *backward(saved)]
        shown = [(r.shape, r.dtype) if isinstance(r, driver.cupy.ndarray) else r for r in results]
        found.append((shown, list(driver.launched)))
    assert found[0] == found[1]
    assert found[0][1]


def test_statistics_are_rows_apart(driver):
    """Each in the memory that the kernel was given for them."""
    _, saved = cunorm.group_norm_forward(driver.array(6, 4, 5, dtype=np.float16), 2)
    places = [saved.mean, saved.inv_std, saved.residual]
    assert [a.data.ptr - places[0].data.ptr for a in places] == [0, 48, 96]
    assert len({id(a.data.mem) for a in places}) == 1  # which stays with each of them


@pytest.mark.usefixtures("short_way_only")
def test_unusual_arrays_take_the_long_way(driver):
    class Own(driver.cupy.ndarray):
        pass

    def usual():
        names = "weight", "bias", "running_mean", "running_var"
        return {"x": driver.array(6, 4, 5), **{name: driver.array(4) for name in names}}

    cunorm.batch_norm_forward(**usual())
    other = {
        "x": [
            driver.array(6, 4, 10)[:, :, ::2],
            driver.array(5, 4, 6).transpose(2, 1, 0),
            driver.array(6, 4, 5, kind=Own),
            driver.array(6, 4, 5, device=1),
            driver.array(6, 4, 5, offset=2),
        ],
        **{
            name: [
                driver.array(5),
                driver.array(8)[::2],
                driver.array(4, kind=Own),
                driver.array(4, device=1),
                driver.array(4, offset=1),
                driver.array(4, dtype=np.float16),
                np.ones(4, np.float32),
            ]
            for name in ("weight", "bias", "running_mean", "running_var")
        },
        "out": [
            driver.array(6, 5, 4),
            driver.array(6, 4, 5, dtype=np.float16),
            driver.array(6, 4, 5, device=1),
            driver.array(6, 4, 10)[:, :, ::2],
            np.ones((6, 4, 5), np.float32),
        ],
    }
    for name, values in other.items():
        for value in values:
            for training in (True, False):
                with pytest.raises(LongWayError):
                    cunorm.batch_norm_forward(**{**usual(), name: value}, training=training)


@pytest.mark.usefixtures("short_way_only")
def test_overlaps_take_the_long_way(driver):
    """By a byte, of what is written with anything else."""

    def at(shape, pointer, offset):
        return driver.cupy.ndarray(shape, np.float32, pointer + offset)

    whole, names = (6, 4, 5), ("x", "weight", "bias", "running_mean", "running_var", "out")
    for training in (True, False):
        written = ("running_mean", "running_var", "out") if training else ("out",)
        for first, second in itertools.permutations(names, 2):
            for back in (True, False):  # the end of one in the other, or its beginning
                given = {n: driver.array(*(whole if n in ("x", "out") else (4,))) for n in names}
                pointer = driver.allocate(1 << 20) + 4096
                shape = given[second].shape
                step = 4 * int(np.prod(shape)) - 4 if back else -4 * given[first].size + 4
                given[second] = at(shape, pointer, 0)
                given[first] = at(given[first].shape, pointer, step)
                if first in written or second in written:
                    with pytest.raises(LongWayError):
                        cunorm.batch_norm_forward(**given, training=training)
                else:
                    cunorm.batch_norm_forward(**given, training=training)
                given[first] = at(given[first].shape, pointer, step + (4 if back else -4))
                cunorm.batch_norm_forward(**given, training=training)  # side by side


@pytest.mark.usefixtures("short_way_only")
def test_unusual_arrays_take_the_long_way_back(driver):
    x, weight = driver.array(6, 4, 5), driver.array(4)
    _, saved = cunorm.batch_norm_forward(x, weight)
    usual = {"dy": driver.array(6, 4, 5), "x": x, "saved": saved, "weight": weight}
    cunorm.batch_norm_backward(**usual)
    pointer = driver.allocate(1 << 20)
    apart = driver.cupy.ndarray((4,), np.float32, pointer, (8,))
    other = {
        "dy": [
            driver.array(6, 4, 5, dtype=np.float64),
            driver.array(6, 4, 5, device=1),
            driver.array(6, 4, 5, offset=1),
            driver.array(6, 4, 10)[:, :, ::2],
            np.ones((6, 4, 5), np.float32),
        ],
        "saved": [
            saved._replace(mean=None),
            saved._replace(mean=apart),
            saved._replace(inv_std=driver.array(4, dtype=np.float64)),
            saved._replace(residual=driver.array(4, device=1)),
            saved._replace(shape=(6, 4, 6)),
        ],
        "weight": [apart, driver.array(5), driver.array(4, dtype=np.float16)],
        "out": [
            driver.cupy.ndarray((6, 4, 5), np.float32, x.data + 4),
            driver.cupy.ndarray((6, 4, 5), np.float32, saved.inv_std.data + -400),
            driver.array(6, 4, 5, dtype=np.float64),
        ],
        "output_mask": [(False, True, True)],
    }
    for name, values in other.items():
        for value in values:
            with pytest.raises(LongWayError):
                cunorm.batch_norm_backward(**{**usual, name: value})
