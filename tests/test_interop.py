"""Arrays of other frameworks through DLPack: no copy, and results of the caller's own type.

The stand-in below has only what the array standard and PyTorch have in common; the
same tests run on PyTorch and on JAX where they are installed (the extra `interop`).
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from cases import group, instance, layer, operands, permuted, rms, scale_shift

import cunorm
from cunorm import arrays
from cunorm.arrays import Place

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
    if type(value).__module__.startswith("jax"):
        return np.asarray(value)
    if value.dtype == sys.modules["torch"].bfloat16:
        return value.view(sys.modules["torch"].uint16).numpy().view(bfloat16)
    return value.numpy()


def from_numpy(framework, array):
    if framework == "stand-in":
        return Tensor(array)
    if framework == "jax":
        return sys.modules["jax"].numpy.array(array)  # a copy, since it is said not to change
    torch = sys.modules["torch"]
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def installed(name):
    return pytest.importorskip(name, reason=f"{name} is not installed (the extra interop)")


@pytest.fixture(params=["stand-in", "torch", "jax"])
def framework(request):
    if request.param == "jax":
        with installed("jax").enable_x64(True):
            yield "jax"
    else:
        if request.param == "torch":
            installed("torch")
        yield request.param


@pytest.fixture
def mutable(framework):
    if framework == "jax":
        pytest.skip("JAX's arrays are not written to")
    return framework


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
def test_round_trip(rng, framework, dtype):
    x, dy = (rng.standard_normal((6, 4, 5)).astype(dtype) for _ in range(2))
    accumulator = np.float64 if dtype == np.float64 else np.float32
    weight = rng.standard_normal(4).astype(accumulator)
    running = np.zeros(4, accumulator), np.ones(4, accumulator)
    theirs = [from_numpy(framework, a.copy()) for a in (x, weight, *running, dy)]
    if framework == "jax":
        theirs[2:4] = [a.copy() for a in running]
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
        other = other if isinstance(other, np.ndarray) else to_numpy(other)
        assert other.dtype == ours.dtype
        np.testing.assert_array_equal(other, ours)


def address(value):
    return value.unsafe_buffer_pointer() if hasattr(value, "unsafe_buffer_pointer") else (
        to_numpy(value).__array_interface__["data"][0]
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
def test_nothing_is_copied(rng, framework, dtype, monkeypatch):
    """Kernels get the caller's memory, and the caller the kernels'."""
    from cunorm.cpu import transform

    x = from_numpy(framework, rng.standard_normal((64, 4, 50)).astype(dtype))
    seen = []
    normalize = transform.normalize

    def note(source, *arguments, **options):
        statistics = normalize(source, *arguments, **options)
        seen.extend(a.__array_interface__["data"][0] for a in (source, arguments[-1]))
        return statistics

    monkeypatch.setattr(transform, "normalize", note)
    y, _ = cunorm.batch_norm_forward(x)
    assert seen[0] == address(x)
    if framework != "jax":  # which takes no memory that begins off 64-byte boundaries
        assert seen[1] == address(y)


def test_memory_is_shared(rng, mutable):
    """`out` is written where it lies, and comes back as the very object given."""
    x = rng.standard_normal((6, 4, 5)).astype(np.float32)
    out = from_numpy(mutable, np.zeros_like(x))
    theirs = from_numpy(mutable, x)
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
    for norm in (ours, theirs):  # a step of gradient descent, of parameters in NumPy
        for name, parameter in norm.parameters.items():
            norm.gradients[name] *= 0.5
            parameter -= norm.gradients[name]
    for name, parameter in ours.parameters.items():
        assert type(theirs.gradients[name]) is np.ndarray
        np.testing.assert_array_equal(theirs.parameters[name], parameter)
        assert not np.array_equal(parameter, cunorm.BatchNorm(4).parameters[name])
    np.testing.assert_array_equal(theirs.running_var, ours.running_var)
    theirs.load_state_dict({n: from_numpy(framework, v) for n, v in ours.state_dict().items()})


def test_arrays_put_into_a_layer(rng, framework):
    """Assigned, they are seen through NumPy; put into `parameters`, they stay there."""
    x, dy = rng.standard_normal((2, 6, 4, 5), dtype=np.float32)
    weight = rng.standard_normal(4, dtype=np.float32)
    expected, layer = cunorm.BatchNorm(4), cunorm.BatchNorm(4)
    expected.weight = weight
    layer.weight = from_numpy(framework, weight.copy())
    layer.parameters["bias"] = from_numpy(framework, layer.bias.copy())
    if framework != "jax":  # whose running statistics could not be updated
        layer.running_mean = from_numpy(framework, np.zeros(4, np.float32))
    assert type(layer.weight) is np.ndarray
    np.testing.assert_array_equal(layer(x), expected(x))
    np.testing.assert_array_equal(layer.backward(dy), expected.backward(dy))
    state = layer.state_dict()
    for name, array in expected.state_dict().items():
        np.testing.assert_array_equal(state[name], array)
    if framework == "jax":
        with pytest.raises(ValueError, match="bias: expected a writable array, got a read-only"):
            layer.load_state_dict(state)
        layer.to("cpu")  # copies what cannot be written
    state["bias"] += 1
    layer.load_state_dict(state)
    layer.to("cpu")
    np.testing.assert_array_equal(layer.bias, state["bias"])
    assert type(layer.bias) is type(layer.running_mean) is np.ndarray
    for nothing in (None, [1.0] * 4):
        with pytest.raises(TypeError, match="weight: expected an array"):
            layer.weight = nothing


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(
    "case", [layer(1), rms(1), group(2), instance(), scale_shift(True)], ids=str
)
def test_every_norm(rng, framework, case, dtype):
    """Also of data whose samples are permuted in memory, and into memory of the caller's."""
    for order in [(0, 1, 2)] if framework == "jax" else [(0, 1, 2), (0, 2, 1)]:
        x, dy, weight, bias = operands(rng, case, (6, 4, 5), dtype)
        x = permuted(x, order)
        ours = case.forward(x, weight, bias)
        theirs = [None if a is None else from_numpy(framework, a) for a in (x, dy, weight, bias)]
        y, saved = case.forward(theirs[0], *theirs[2:])
        gradients = case.backward(theirs[1], theirs[0], saved, theirs[2])
        results = [y, *gradients, *(saved or ())[:3]]
        expected = [ours[0], *case.backward(dy, x, ours[1], weight), *(ours[1] or ())[:3]]
        if framework != "jax":
            out = from_numpy(framework, np.zeros_like(x))
            assert case.forward(theirs[0], *theirs[2:], out=out)[0] is out
            np.testing.assert_array_equal(to_numpy(out), ours[0])
        for result, own in zip(results, expected, strict=True):
            assert (result is None) == (own is None)
            if own is not None:
                assert type(result) is type(theirs[0])
                np.testing.assert_array_equal(to_numpy(result), own)


def test_tensor_that_requires_gradients():
    torch = installed("torch")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros((4, 3), requires_grad=True, dtype=dtype)
        with pytest.raises(TypeError, match=r"x: .*that records no gradients.* detach\(\)"):
            cunorm.batch_norm_forward(x)


def test_tensors_that_are_no_plain_memory():
    """Each is told what it is; a negation that is only noted must not be lost."""
    torch = installed("torch")
    values = torch.randn(4, 3, dtype=torch.complex64).conj().imag
    assert values.is_neg()
    for tensor, message in (
        (values, r"x: .*negates them; pass its resolve_neg\(\)"),
        (torch.zeros(4, 3).to_sparse(), "x: Tensor cannot be shared through DLPack: .*layout"),
        (torch.zeros(4, 3, device="meta"), "x: Tensor cannot be shared through DLPack: .*meta"),
    ):
        with pytest.raises(TypeError, match=message):
            cunorm.batch_norm_forward(tensor)
    with pytest.raises(TypeError, match=r"x: expected dtype float16, .* got int32"):
        cunorm.batch_norm_forward(torch.zeros(4, 3, dtype=torch.int32))
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"weight: .* got a Parameter that requires them"):
        cunorm.batch_norm_forward(torch.zeros(4, 3), parameter)
    with torch.inference_mode():
        y, _ = cunorm.layer_norm_forward(torch.randn(4, 3))
    assert type(y) is torch.Tensor


def test_memory_order_of_tensors(rng):
    """Channels last stays so; a broadcast or sliced tensor is computed like any other."""
    torch = installed("torch")
    x = torch.from_numpy(rng.standard_normal((6, 4, 5, 3), dtype=np.float32))
    expected, _ = cunorm.batch_norm_forward(x.numpy())
    y, _ = cunorm.batch_norm_forward(x.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)
    for view in (x[::2, :, 1:], x[:1].expand(6, 4, 5, 3), x.transpose(0, 3)):
        y, _ = cunorm.batch_norm_forward(view)
        expected, _ = cunorm.batch_norm_forward(view.numpy())
        np.testing.assert_array_equal(y.numpy(), expected)


def test_arrays_that_are_never_written(rng):
    """What JAX holds does not change; running statistics of another library go with it."""
    jax = installed("jax")
    x = jax.numpy.asarray(rng.standard_normal((6, 4), dtype=np.float32))
    zeros, ones = jax.numpy.zeros(4), jax.numpy.ones(4)
    for call, name in (
        (lambda: cunorm.batch_norm_forward(x, None, None, zeros, ones), "running_mean"),
        (lambda: cunorm.batch_norm_forward(x, out=jax.numpy.zeros_like(x)), "out"),
        (lambda: cunorm.update_running_statistics(zeros, None, ones, ones, 6), "running_mean"),
    ):
        with pytest.raises(ValueError, match=f"{name}: .*read-only one .JAX's are; NumPy's"):
            call()
    y, _ = cunorm.batch_norm_forward(x, None, None, zeros, ones, training=False)
    np.testing.assert_allclose(np.asarray(y), np.asarray(x), rtol=1e-5)
    assert not np.asarray(zeros).any()
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    cunorm.batch_norm_forward(x, None, None, mean, var, exponential_average_factor=1.0)
    np.testing.assert_allclose(mean, np.asarray(x).mean(0), rtol=1e-5, atol=1e-6)


def test_arrays_of_jax_on_a_gpu_are_known_by_their_type():
    """CuPy's view of one does not say that it is read-only."""
    from cunorm import arrays, checks

    immutable = type("ArrayImpl", (), {"__module__": "jaxlib._jax"})()
    assert arrays._is_of_jax(immutable)
    assert not arrays._is_of_jax(np.zeros(3))
    mean, var = np.zeros((2, 3))
    place = arrays.Place(np, None, read_only=("running_var",))
    with pytest.raises(ValueError, match="running_var: expected a writable array"):
        checks.running_statistics(place, mean, var)


def test_values_that_are_still_computed(rng):
    """JAX returns before it has computed; whoever reads the memory has to wait."""
    jax = installed("jax")

    @jax.jit
    def slow(x):
        return jax.numpy.linalg.matrix_power(x / 1000, 20) + x

    x = jax.numpy.asarray(rng.standard_normal((1000, 1000), dtype=np.float32))
    slow(x).block_until_ready()
    for i in range(3):
        later = slow(x + i)
        y, _ = cunorm.layer_norm_forward(later)
        expected, _ = cunorm.layer_norm_forward(np.array(later))
        np.testing.assert_array_equal(np.asarray(y), expected)


def test_traced_values():
    jax = installed("jax")
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeError, match=r"x: .*Tracer, which has no elements yet: .*callback"):
            transform(lambda x: cunorm.layer_norm_forward(x)[0].sum())(jax.numpy.ones((3, 4)))


def test_libraries_together(rng):
    """The first array decides whose the results are."""
    torch, jax = installed("torch"), installed("jax")
    x = rng.standard_normal((6, 4), dtype=np.float32)
    weight = rng.standard_normal(4, dtype=np.float32)
    expected, _ = cunorm.layer_norm_forward(x, weight)
    for make in (np.asarray, torch.from_numpy, jax.numpy.asarray):
        for other in (np.asarray, torch.from_numpy, jax.numpy.asarray):
            y, _ = cunorm.layer_norm_forward(make(x), other(weight))
            assert type(y) is type(make(x))
            np.testing.assert_array_equal(np.asarray(y), expected)


def test_outputs_that_a_framework_cannot_have(rng):
    """An `out` goes back as it is: PyTorch, whose x it belongs to, has no negative strides."""
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.standard_normal((3, 4, 5), np.float32))
    for out in (
        np.empty((3, 4, 5), np.float32)[::-1],
        np.zeros((3, 4), [("a", np.float32, 5), ("b", np.int16)])["a"],
    ):
        y, saved = cunorm.batch_norm_forward(x, out=out)
        assert y is out
        np.testing.assert_array_equal(y, cunorm.batch_norm_forward(x.numpy())[0])
        assert cunorm.group_norm_forward(x, 2, out=out)[0] is out
        assert cunorm.layer_norm_forward(x, out=out)[0] is out
        dx, dweight, _ = cunorm.batch_norm_backward(x, x, saved, out=out)
        assert dx is out
        assert isinstance(dweight, torch.Tensor)


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


def test_an_output_is_handed_over_on_a_gpu():
    """Its framework's stream is told to wait for CuPy's, even if nothing new is returned."""
    handed = []

    def export(array):
        handed.append(array)
        return f"their {array}"

    gpu = Place(object(), None, export)
    assert gpu.export("y", "mean", None, given="out") == ("out", "their mean", None)
    assert gpu.export("y", given="out") == ("out",)
    assert handed == ["y", "mean", "y"]
    cpu = Place(np, None, export)
    assert cpu.export("y", given="out") == ("out",)
    assert handed == ["y", "mean", "y"]


def test_running_statistics_are_handed_over_on_a_gpu(monkeypatch):
    """What is updated in place is an output, too."""
    handed = []
    place = Place(object(), arrays.cpu_backend(), handed.append)
    monkeypatch.setattr(arrays, "adopt", lambda _, *values: (values, place))
    mean, var, ones = np.zeros(3), np.ones(3), np.ones(3)
    cunorm.update_running_statistics(mean, var, ones, ones, 5)
    assert [id(array) for array in handed] == [id(mean), id(var)]
    cunorm.update_running_statistics(None, var, ones, ones, 5)
    assert handed[2] is var
