"""What only a GPU can show: CuPy's own arrays, streams, graphs, layers, sizes."""

import contextlib
import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest
import reference
import tolerances
from cases import group, instance, layer, operands, rms, scale_shift
from tolerances import assert_within

import cunorm
from cunorm import arrays, checks

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def cupy(backend):
    if backend != "gpu":
        pytest.skip("needs a GPU: pytest --backend gpu")
    return pytest.importorskip("cupy")


def test_cupy_arrays_in_and_out(cupy, rng):
    x, dy = (cupy.asarray(a) for a in rng.standard_normal((2, 6, 4, 5)).astype(np.float32))
    y, saved = cunorm.batch_norm_forward(x)
    gradients = cunorm.batch_norm_backward(dy, x, saved)
    for array in (y, *saved[:3], *gradients, *cunorm.batch_norm_statistics(x)[1:]):
        assert isinstance(array, cupy.ndarray)
    result = reference.forward(x.get())
    assert_within(y.get(), result.y, tolerances.y_bound(result, None, None, 30, x.dtype), "y")
    with pytest.raises(TypeError, match=r"weight: .* device of x, GPU \d+, got one on the CPU"):
        cunorm.batch_norm_forward(x, np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (layer(), (6, 40)),
        (rms(), (6, 40)),
        (group(2), (3, 4, 50)),
        (group(2, -1), (3, 50, 4)),
        (instance(), (3, 4, 50)),
        (scale_shift(True), (3, 4, 50)),
    ],
    ids=str,
)
def test_other_norms(cupy, rng, case, shape):
    """CuPy arrays in and out, also with the axes in another order."""
    host = operands(rng, case, shape, np.float32)
    x, dy, weight, bias = (None if a is None else cupy.asarray(a) for a in host)
    norm = case.norm(shape)
    for turned in (lambda a: a, lambda a: cupy.asfortranarray(a)):
        y, saved = case.forward(turned(x), weight, bias)
        gradients = case.backward(turned(dy), turned(x), saved, weight)
        kept = [] if saved is None else [a for a in saved[:3] if a is not None]
        for array in (y, *kept, *(g for g in gradients if g is not None)):
            assert isinstance(array, cupy.ndarray)
        result = reference.forward(host[0], host[2], host[3], norm=norm, **case.given)
        expected = reference.backward(host[1], host[0], host[2], norm=norm, **case.given)
        np.testing.assert_allclose(y.get(), result.y, atol=1e-4)
        for gradient, right in zip(gradients, expected, strict=True):
            if gradient is not None:
                np.testing.assert_allclose(gradient.get(), right, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (None, (6, 4, 50)),
        (layer(), (6, 40)),
        (layer(1), (6, 4, 50)),
        (rms(), (6, 40)),
        (group(2), (3, 4, 50)),
        (instance(), (3, 4, 50)),
        (scale_shift(False), (3, 4, 50)),
        (scale_shift(True), (3, 4, 50)),
    ],
    ids=str,
)
def test_usual_arrays_take_a_short_way(cupy, rng, monkeypatch, case, shape, dtype):
    """To the bits of the long one."""
    host = operands(rng, case or group(1), shape, dtype)
    x, dy, weight, bias = (None if a is None else cupy.asarray(a) for a in host)
    bias = None if bias is None else bias.astype(dtype)
    found = []
    for short in (True, False):
        results = []
        with monkeypatch.context() as patch:
            if short:
                patch.setattr(arrays, "adopt", None)
            else:
                patch.setattr(checks, "are_usual", lambda *_, **__: False)
                patch.setattr(checks, "are_usual_in_backward", lambda *_, **__: False)
            if case is None:
                running = [cupy.full(4, value, weight.dtype) for value in (0.25, 2)]
                for options in ({}, {"training": False}, {"out": cupy.empty_like(x)}):
                    y, saved = cunorm.batch_norm_forward(x, weight, bias, *running, **options)
                    gradients = cunorm.batch_norm_backward(dy, x, saved, weight)
                    results += [y, *saved[:3], *running, *gradients]
                twice = x.copy()
                results += cunorm.batch_norm_forward(twice, weight, bias, out=twice)[:1]
            else:
                y, saved = case.forward(x, weight, bias)
                kept = [] if saved is None else saved[:3]
                results += [y, *kept, *case.backward(dy, x, saved, weight)]
        found.append([None if a is None else a.get() for a in results])
    for one, other in zip(*found, strict=True):
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_layer(cupy, rng):
    """Trains there, and comes back."""
    x, dy = rng.standard_normal((2, 32, 8, 6, 6)).astype(np.float32)
    layer = cunorm.BatchNorm(8).to("cuda")
    weight, bias = np.ones(8), np.zeros(8)
    for _ in range(3):
        result = reference.forward(x, weight, bias)
        expected = reference.backward(dy, x, weight)
        np.testing.assert_allclose(layer(cupy.asarray(x)).get(), result.y, atol=1e-4)
        np.testing.assert_allclose(layer.backward(cupy.asarray(dy)).get(), expected.dx, atol=1e-4)
        weight, bias = weight - 0.01 * expected.dweight, bias - 0.01 * expected.dbias
        for name, parameter in layer.parameters.items():
            assert isinstance(parameter, cupy.ndarray)
            parameter -= 0.01 * layer.gradients[name]
    state = layer.to("cpu").state_dict()
    np.testing.assert_allclose(state["weight"], weight, atol=1e-4)
    np.testing.assert_allclose(state["running_mean"], (1 - 0.9**3) * result.mean, atol=1e-5)
    assert state["num_batches_tracked"] == 3
    other = cunorm.BatchNorm(8).to("cuda")
    other.load_state_dict(state)
    np.testing.assert_array_equal(other.weight.get(), state["weight"])


@pytest.mark.parametrize("shape", [(8, 3, 40_000), (8, 40, 120_000)], ids=str)
def test_two_streams(cupy, rng, shape):
    """Calls on different streams share nothing, nor do blocks that wait keep the others out."""
    arrays = [cupy.asarray(rng.standard_normal(shape), np.float32) for _ in range(2)]
    expected = [cunorm.batch_norm_forward(x)[0] for x in arrays]
    cupy.cuda.runtime.deviceSynchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in arrays]
    for _ in range(50):
        results = []
        for stream, x in zip(streams, arrays, strict=True):
            with stream:
                results.append(cunorm.batch_norm_forward(x)[0])
        cupy.cuda.runtime.deviceSynchronize()
        for y, want in zip(results, expected, strict=True):
            cupy.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    "shape", [(8, 16, 4, 4), (32, 64, 28, 28), (8, 2, 500_000), (8, 40, 120_000)], ids=str
)
def test_graph(cupy, rng, shape):
    """A training step is captured once its kernels are warm, and replayed."""
    x, dy = (cupy.asarray(rng.standard_normal(shape), np.float32) for _ in range(2))
    y, dx = cupy.empty_like(x), cupy.empty_like(x)
    running = cupy.zeros(shape[1], np.float32), cupy.ones(shape[1], np.float32)

    def step():
        _, saved = cunorm.batch_norm_forward(x, None, None, *running, out=y)
        cunorm.batch_norm_backward(dy, x, saved, out=dx)

    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()  # what a replay writes stays the graph's
    with stream:
        with cupy.cuda.using_allocator(pool.malloc):
            step()
            stream.begin_capture()
            step()
            graph = stream.end_capture()
        others = [cupy.full(size, 7.0) for size in (16, 512, 4096, 65536) for _ in range(8)]
        x[...] = cupy.asarray(rng.standard_normal(shape), np.float32)
        running[0].fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert all(bool((array == 7).all()) for array in others)
    result = reference.forward(x.get())
    n = x.size // shape[1]
    assert_within(y.get(), result.y, tolerances.y_bound(result, None, None, n, x.dtype), "y")
    np.testing.assert_allclose(running[0].get(), 0.1 * result.mean, atol=1e-5)
    expected = reference.backward(dy.get(), x.get())
    bounds = tolerances.backward_bounds(expected, result, dy.get(), None, n, x.dtype)
    assert_within(dx.get(), expected.dx, bounds.dx, "dx")


@pytest.mark.parametrize(("shape", "axis"), [((3, 1 << 20, 1024), 1), (((1 << 25) + 1, 96), 1)])
def test_large_arrays_on_a_gpu(cupy, shape, axis):
    """More than 2^31 elements: the ends, and one in the middle, against the reference."""
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 5 * 2 * int(np.prod(shape)):
        pytest.skip("needs more memory")
    x = cupy.empty(shape, np.float16)
    for part in cupy.array_split(x.reshape(-1), 64):
        part[...] = cupy.random.standard_normal(part.size, np.float32)
    y, saved = cunorm.batch_norm_forward(x, channel_axis=axis)
    dx, _, _ = cunorm.batch_norm_backward(y, x, saved)
    for channel in (0, shape[1] // 2, shape[1] - 1):
        one = x.take(channel, axis).reshape(-1, 1).get()
        result = reference.forward(one)
        bound = tolerances.y_bound(result, None, None, one.size, x.dtype)
        assert_within(y.take(channel, axis).reshape(-1, 1).get(), result.y, bound, "y")
        got = dx.take(channel, axis).reshape(-1, 1).get()
        dy = y.take(channel, axis).reshape(-1, 1).get()
        expected = reference.backward(dy, one)
        bounds = tolerances.backward_bounds(expected, result, dy, None, one.size, x.dtype)
        assert_within(got, expected.dx, bounds.dx, "dx")


@pytest.mark.usefixtures("cupy")
def test_torch_tensors_on_a_gpu(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.asarray(rng.standard_normal((6, 4, 5)), dtype=torch.bfloat16, device="cuda")
    y, saved = cunorm.batch_norm_forward(x)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == torch.bfloat16
    assert y.device == x.device
    expected = torch.nn.functional.batch_norm(x.float(), None, None, training=True)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    assert isinstance(saved.mean, torch.Tensor)


def test_repeatable_on_a_gpu(cupy, rng):
    """The same bits in every run, for every plan of a real device."""
    for shape, axis in [
        ((8, 16, 4, 4), 1),
        ((64, 256, 28, 28), 1),
        ((8, 2, 500_000), 1),
        ((8, 40, 120_000), 1),
        ((20_000, 70), -1),
        ((60_000, 256), -1),
        ((64, 56, 56, 64), -1),
    ]:
        x, dy = (cupy.asarray(rng.standard_normal(shape), np.float32) for _ in range(2))
        first = None
        for _ in range(20):
            y, saved = cunorm.batch_norm_forward(x, channel_axis=axis)
            results = [y, *saved[:3], *cunorm.batch_norm_backward(dy, x, saved)]
            first = first or results
            for a, b in zip(first, results, strict=True):
                cupy.testing.assert_array_equal(a, b)


def test_synchronized_over_nccl(cupy, rng):
    """One rank of NCCL, by either of CuPy's ways, and of MPI where there is one: batch norm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, of NCCL that it cannot load
        from cupy.cuda import nccl
    if not nccl.available:
        pytest.skip("NCCL is not installed")
    x, dy = (cupy.asarray(rng.standard_normal((6, 4, 5)), np.float32) for _ in range(2))
    alone = cunorm.BatchNorm(4).to("cuda")
    expected = alone(x), alone.backward(dy)
    communicators = [nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)]
    with contextlib.suppress(ImportError, RuntimeError):  # the latter without an MPI library
        from mpi4py import MPI

        communicators.append(MPI.COMM_SELF)
    for communicator in communicators:
        layer = cunorm.SyncBatchNorm(4, communicator=communicator).to("cuda")
        found = layer(x), layer.backward(dy)
        for a, b in zip(found, expected, strict=True):
            cupy.testing.assert_allclose(a, b, atol=1e-6)
        cupy.testing.assert_allclose(layer.running_var, alone.running_var, rtol=1e-6)


def test_convolution_and_batch_norm(cupy, rng):
    """On CuPy arrays: the two in turn, to the bit, and the numbers of NumPy's."""
    host = [
        rng.standard_normal(shape).astype(np.float32)
        for shape in [(3, 4, 9, 8), (6, 2, 3, 3), (6,), (6,), (3, 6, 9, 8)]
    ]
    x, conv_weight, weight, bias, dy = map(cupy.asarray, host)
    convolution = cunorm.MatmulConvolution(1 << 14)
    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 2}
    y, saved = cunorm.conv_batch_norm_forward(
        x, conv_weight, weight, bias, convolution=convolution, **options
    )
    gradients = cunorm.conv_batch_norm_backward(dy, x, conv_weight, saved, weight)
    z = convolution.forward(x, conv_weight, **options)
    expected, norm = cunorm.batch_norm_forward(z, weight, bias)
    dz, *others = cunorm.batch_norm_backward(dy, z, norm, weight)
    dx = convolution.backward_input(dz, conv_weight, x, **options)
    dconv_weight = convolution.backward_weight(dz, x, conv_weight, **options)
    for actual, other in zip((y, *gradients), (expected, dx, dconv_weight, *others), strict=True):
        assert isinstance(actual, cupy.ndarray)
        np.testing.assert_array_equal(actual.get(), other.get())
    on_cpu = convolution.forward(host[0], host[1], **options)
    np.testing.assert_allclose(z.get(), on_cpu, atol=1e-5)


def test_conv_batch_norm_layer(cupy, rng):
    """Moved to the GPU it computes what it does on the CPU."""
    x = rng.standard_normal((8, 4, 9, 8)).astype(np.float32)
    layer = cunorm.ConvBatchNorm(4, 6, 3, padding=1, rng=0)
    y = layer(x)
    dx = layer.backward(y)
    moved = cunorm.ConvBatchNorm(4, 6, 3, padding=1, rng=0).to("cuda")
    other = moved(cupy.asarray(x))
    np.testing.assert_allclose(other.get(), y, atol=1e-4)
    np.testing.assert_allclose(moved.backward(other).get(), dx, atol=1e-3)
    weight, bias = moved.fold_into(moved.conv_weight)
    assert isinstance(weight, cupy.ndarray)
    assert isinstance(bias, cupy.ndarray)


def test_cudnn(cupy, rng):
    """The two convolutions agree, where cuDNN's front end is installed."""
    pytest.importorskip("cudnn")
    options = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 1), "groups": 2}
    for dtype, tolerance in ((np.float16, 2e-2), (np.float32, 1e-4), (np.float64, 1e-10)):
        x = cupy.asarray(rng.standard_normal((4, 8, 20, 18)).astype(dtype))
        weight = cupy.asarray(rng.standard_normal((16, 4, 3, 3)).astype(dtype))
        found = []
        for convolution in (cunorm.MatmulConvolution(), cunorm.CudnnConvolution()):
            y = convolution.forward(x, weight, **options)
            dx = convolution.backward_input(y, weight, x, **options)
            found.append((y, dx, convolution.backward_weight(y, x, weight, **options)))
        for actual, expected in zip(*found, strict=True):
            scale = float(abs(expected).max())
            np.testing.assert_allclose(
                actual.get().astype(np.float64), expected.get().astype(np.float64),
                atol=tolerance * scale,
            )  # fmt: skip


def test_example_of_a_graph(cupy):
    """Replayed, it does what it does when it is called."""
    spec = importlib.util.spec_from_file_location("cuda_graph", EXAMPLES / "cuda_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = cupy.random.standard_normal((4096, 64), dtype="float32")
    step, other = module.Step(x, 3 * x + 2), module.Step(x, 3 * x + 2)
    graph, stream, _pool = module.capture(step)
    other()
    for _ in range(100):
        graph.launch(stream)
        other()
    stream.synchronize()
    np.testing.assert_array_equal(step.weight.get(), other.weight.get())
    assert float(step.loss) < 0.02
