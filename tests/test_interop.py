"""Arrays of other frameworks through DLPack: no copy, and results of the caller's own type.

The stand-in below has only what the array standard and PyTorch have in common; the
same tests run on PyTorch itself where it is installed.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from cases import group, instance, layer, operands, permuted, rms, scale_shift

import cunorm

uint16 = np.uint16
bfloat16 = ml_dtypes.bfloat16


class Tensor:
    """An array type of a framework that cunorm has never heard of: this module."""

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype

    def __dlpack__(self, **options):
        if self.dtype == bfloat16:
            raise BufferError("NumPy has no bfloat16 in DLPack")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def view(self, dtype):
        return Tensor(self.array.view(dtype))

    @property
    def shape(self):
        return self.array.shape


def from_dlpack(array):
    return Tensor(np.from_dlpack(array))


def to_numpy(value):
    if isinstance(value, Tensor):
        return value.array
    if value.dtype == sys.modules["torch"].bfloat16:
        return value.view(sys.modules["torch"].uint16).numpy().view(bfloat16)
    return value.numpy()


def from_numpy(framework, array):
    if framework == "stand-in":
        return Tensor(array)
    torch = sys.modules["torch"]
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.fixture(params=["stand-in", "torch"])
def framework(request):
    if request.param == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    return request.param


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
def test_round_trip(rng, framework, dtype):
    x, dy = (rng.standard_normal((6, 4, 5)).astype(dtype) for _ in range(2))
    accumulator = np.float64 if dtype == np.float64 else np.float32
    weight = rng.standard_normal(4).astype(accumulator)
    running = np.zeros(4, accumulator), np.ones(4, accumulator)
    theirs = [from_numpy(framework, a.copy()) for a in (x, weight, *running, dy)]
    y, saved = cunorm.batch_norm_forward(x, weight, None, *running)
    gradients = cunorm.batch_norm_backward(dy, x, saved, weight)
    their_y, their_saved = cunorm.batch_norm_forward(theirs[0], theirs[1], None, *theirs[2:4])
    their_gradients = cunorm.batch_norm_backward(theirs[4], theirs[0], their_saved, theirs[1])
    assert type(their_y) is type(theirs[0])
    assert type(their_saved.mean) is type(theirs[0])
    for ours, other in [
        (y, their_y),
        (saved.mean, their_saved.mean),
        (running[0], theirs[2]),  # updated in place, through the view
        (running[1], theirs[3]),
        *zip(gradients, their_gradients, strict=True),
    ]:
        assert to_numpy(other).dtype == ours.dtype
        np.testing.assert_array_equal(to_numpy(other), ours)


def test_memory_is_shared(rng, framework):
    """`out` is written where it lies, and comes back as the very object given."""
    x = rng.standard_normal((6, 4, 5)).astype(np.float32)
    out = from_numpy(framework, np.zeros_like(x))
    theirs = from_numpy(framework, x)
    y, saved = cunorm.batch_norm_forward(theirs, out=out)
    expected, ours = cunorm.batch_norm_forward(x)
    assert y is out
    np.testing.assert_array_equal(to_numpy(out), expected)
    dx, _, _ = cunorm.batch_norm_backward(theirs, theirs, saved, out=out)
    assert dx is out
    np.testing.assert_array_equal(to_numpy(out), cunorm.batch_norm_backward(x, x, ours)[0])


def test_layer(rng, framework):
    x = rng.standard_normal((6, 4, 5)).astype(np.float32)
    ours, theirs = cunorm.BatchNorm(4), cunorm.BatchNorm(4)
    np.testing.assert_array_equal(to_numpy(theirs(from_numpy(framework, x))), ours(x))
    dx = theirs.backward(from_numpy(framework, x))
    np.testing.assert_array_equal(to_numpy(dx), ours.backward(x))
    np.testing.assert_array_equal(theirs.running_var, ours.running_var)
    theirs.load_state_dict({n: from_numpy(framework, v) for n, v in ours.state_dict().items()})


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(
    "case", [layer(1), rms(1), group(2), instance(), scale_shift(True)], ids=str
)
def test_every_norm(rng, framework, case, dtype):
    """Also of data whose samples are permuted in memory, and into memory of the caller's."""
    for order in [(0, 1, 2), (0, 2, 1)]:
        x, dy, weight, bias = operands(rng, case, (6, 4, 5), dtype)
        x = permuted(x, order)
        ours = case.forward(x, weight, bias)
        theirs = [None if a is None else from_numpy(framework, a) for a in (x, dy, weight, bias)]
        y, saved = case.forward(theirs[0], *theirs[2:])
        gradients = case.backward(theirs[1], theirs[0], saved, theirs[2])
        results = [y, *gradients, *(saved or ())[:3]]
        expected = [ours[0], *case.backward(dy, x, ours[1], weight), *(ours[1] or ())[:3]]
        out = from_numpy(framework, np.zeros_like(x))
        assert case.forward(theirs[0], *theirs[2:], out=out)[0] is out
        for result, own in zip([*results, out], [*expected, ours[0]], strict=True):
            assert (result is None) == (own is None)
            if own is not None:
                assert type(result) is type(theirs[0])
                np.testing.assert_array_equal(to_numpy(result), own)


def test_tensor_that_requires_gradients():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros((4, 3), requires_grad=True, dtype=dtype)
        with pytest.raises(TypeError, match=r"x: .*that records no gradients.* detach\(\)"):
            cunorm.batch_norm_forward(x)


def test_framework_without_a_way_back(rng):
    """Found out before anything is computed; a subclass is its base's framework's."""
    x = rng.standard_normal((6, 4)).astype(np.float32)
    bare = {"__dlpack__": x.__dlpack__, "__dlpack_device__": x.__dlpack_device__}
    one_way = type("OneWay", (), {"__module__": "nowhere"} | {
        name: staticmethod(method) for name, method in bare.items()
    })()  # fmt: skip
    running = np.zeros(4, np.float32), np.ones(4, np.float32)
    with pytest.raises(TypeError, match="x: expected an array of a framework with from_dlpack"):
        cunorm.batch_norm_forward(one_way, None, None, *running)
    assert not running[0].any()
    derived = type("Derived", (Tensor,), {"__module__": "nowhere"})
    y, _ = cunorm.batch_norm_forward(derived(x))
    assert type(y) is Tensor


def test_device_unknown():
    class Elsewhere(Tensor):
        def __dlpack_device__(self):
            return 8, 0

    with pytest.raises(TypeError, match="x: expected an array on a CPU or CUDA device"):
        cunorm.batch_norm_forward(Elsewhere(np.zeros((3, 4))))
