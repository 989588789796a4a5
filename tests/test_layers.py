"""The layers: their modes, their state, their cache."""

import copy
import gc
import pickle
import weakref
import zipfile

import ml_dtypes
import numpy as np
import pytest

import cunorm


@pytest.fixture
def batches(rng):
    return [(rng.standard_normal((6, 4, 5)) * 2 + 1).astype(np.float32) for _ in range(4)]


def snapshot(layer):
    return {name: array.copy() for name, array in layer.state_dict().items()}


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_is_the_functions(batches, rng):
    """Forward and backward give the bits of batch_norm_forward and batch_norm_backward."""
    layer = cunorm.BatchNorm(4, eps=1e-3, momentum=0.9)
    layer.weight[...], layer.bias[...] = rng.standard_normal((2, 4))
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    for x in batches:
        y, saved = cunorm.batch_norm_forward(
            x, layer.weight, layer.bias, mean, var, momentum=0.9, eps=1e-3
        )
        np.testing.assert_array_equal(layer(x), y)
        dx, dweight, dbias = cunorm.batch_norm_backward(y, x, saved, layer.weight)
        np.testing.assert_array_equal(layer.backward(y), dx)
        assert list(layer.gradients) == list(layer.parameters) == ["weight", "bias"]
        np.testing.assert_array_equal(layer.gradients["weight"], dweight)
        np.testing.assert_array_equal(layer.gradients["bias"], dbias)
    np.testing.assert_array_equal(layer.running_mean, mean)
    np.testing.assert_array_equal(layer.running_var, var)
    assert layer.num_batches_tracked == 4
    before = snapshot(layer)
    y = layer.eval().forward(batches[0])
    expected, saved = cunorm.batch_norm_forward(
        batches[0], layer.weight, layer.bias, mean, var, training=False, eps=1e-3
    )
    np.testing.assert_array_equal(y, expected)
    dx = cunorm.batch_norm_backward(y, batches[0], saved, layer.weight)[0]
    np.testing.assert_array_equal(layer.backward(y), dx)
    assert_same_state(layer.state_dict(), before)


def test_parameters_and_gradients_are_the_layers_own(batches):
    """An optimizer may change the arrays or put others in their place."""
    layer = cunorm.BatchNorm(4)
    layer.parameters["weight"] -= 0.5
    np.testing.assert_array_equal(layer.weight, np.full(4, 0.5, np.float32))
    layer.parameters["bias"] = layer.parameters["bias"] + 2
    np.testing.assert_array_equal(layer.bias, np.full(4, 2, np.float32))
    y = layer(batches[0])
    np.testing.assert_allclose(y.mean((0, 2)), np.full(4, 2), rtol=1e-5)
    layer.backward(y)
    layer.gradients["weight"] = layer.gradients["weight"] * 0
    assert not layer.gradients["weight"].any()
    layer.weight = np.full(4, 3.0)
    assert layer.parameters["weight"].dtype == np.float64
    layer.parameters["weight"] = np.ones(5, np.float32)
    with pytest.raises(ValueError, match=r"weight: expected shape \(4,\)"):
        layer(batches[0])


def test_averaging_can_be_changed(batches):
    """In fine-tuning, say; momentum and factor are two views of one number."""
    layer = cunorm.BatchNorm(4)
    assert (layer.momentum, layer.exponential_average_factor) == (0.9, 0.1)
    layer.momentum = 0.75
    assert layer.exponential_average_factor == 0.25
    layer.exponential_average_factor = 1
    layer(batches[0])
    np.testing.assert_allclose(layer.running_mean, batches[0].mean((0, 2)), rtol=1e-5)
    layer.exponential_average_factor = "cumulative"
    assert layer.momentum is None
    with pytest.raises(ValueError, match="from 0 to 1 or \"cumulative\", got 'sometimes'"):
        layer.exponential_average_factor = "sometimes"
    with pytest.raises(ValueError, match="momentum: expected"):
        layer.momentum = 2
    with pytest.warns(UserWarning, match="PyTorch") as record:
        layer.momentum = 0.1
    assert record[0].filename == __file__


def test_recomputation_leaves_running_statistics_alone(batches):
    layer = cunorm.BatchNorm(4)
    first = layer.forward(batches[0])
    before = snapshot(layer)
    again = layer.forward(batches[0], update_statistics=False)
    np.testing.assert_array_equal(again, first)
    assert_same_state(layer.state_dict(), before)
    layer.backward(first)


def test_frozen_stays_frozen(batches):
    """Through train: the statistics stay, nothing is left to train, inference's gradient."""
    layer = cunorm.BatchNorm(4)
    layer(batches[0])
    layer.backward(batches[0])
    assert layer.gradients
    assert layer.freeze() is layer
    before = snapshot(layer)
    assert layer.train() is layer
    for x in batches:
        y = layer(x)
        inv_std = 1 / np.sqrt(layer.running_var + 1e-5)
        np.testing.assert_allclose(
            y[:, 2], (x[:, 2] - layer.running_mean[2]) * inv_std[2], rtol=1e-5, atol=1e-6
        )
        dx = layer.backward(x)
        np.testing.assert_allclose(dx, x * inv_std[:, None], rtol=1e-5)
        assert layer.parameters == layer.gradients == {}
    assert_same_state(layer.state_dict(), before)
    layer.unfreeze()(batches[1])
    assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
    assert set(layer.parameters) == {"weight", "bias"}
    with pytest.raises(ValueError, match="freeze: expected a layer with running statistics"):
        cunorm.BatchNorm(4, track_running_statistics=False).freeze()


def test_cumulative_average(batches):
    """All batches weigh the same."""
    layer = cunorm.BatchNorm(4, exponential_average_factor="cumulative")
    for x in batches:
        layer(x)
    np.testing.assert_allclose(
        layer.running_mean, np.mean([x.mean((0, 2)) for x in batches], 0), rtol=1e-5
    )
    variances = [x.var((0, 2), ddof=1) for x in batches]
    np.testing.assert_allclose(layer.running_var, np.mean(variances, 0), rtol=1e-5)
    layer(batches[0], update_statistics=False)
    assert layer.num_batches_tracked == 4
    layer(batches[0][:0])
    assert layer.num_batches_tracked == 4


def test_without_running_statistics(batches):
    """The batch's own are used in inference too."""
    layer = cunorm.BatchNorm(4, track_running_statistics=False)
    y = layer(batches[0])
    np.testing.assert_array_equal(layer.eval()(batches[0]), y)
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_without_parameters(batches):
    layer = cunorm.BatchNorm(4, affine=False)
    y = layer(batches[0])
    layer.backward(y)
    assert layer.parameters == layer.gradients == {}
    assert set(layer.state_dict()) == {"running_mean", "running_var", "num_batches_tracked"}


def test_backward_needs_its_forward(batches):
    layer = cunorm.BatchNorm(4)
    with pytest.raises(RuntimeError, match="backward: expected a call of forward before each"):
        layer.backward(batches[0])
    layer(batches[0])
    with pytest.raises(ValueError, match="dy: expected the shape of x"):
        layer.backward(batches[0][:2])
    layer.backward(batches[0])  # the failed call changed nothing
    with pytest.raises(RuntimeError, match="backward: expected a call of forward before each"):
        layer.backward(batches[0])


def test_lets_go_of_x_after_backward(rng):
    layer = cunorm.BatchNorm(4)

    class Referable(np.ndarray):
        """Plain arrays take no weak references."""

    x = rng.standard_normal((8, 4)).view(Referable)
    layer.forward(x)
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is not None
    layer.backward(np.ones((8, 4)))  # float64, as NumPy draws it, through float32 parameters
    gc.collect()
    assert reference() is None


def test_error_in_forward_changes_nothing(batches):
    layer = cunorm.BatchNorm(4)
    y = layer(batches[0])
    before = snapshot(layer)
    for x, error, message in [
        (batches[0][:, :3], ValueError, r"x: expected 4 channels at axis 1, got shape \(6, 3, 5\)"),
        (batches[0][:1, :, :1], ValueError, "more than 1 value per channel"),
        (batches[0].astype(int), TypeError, "x: expected dtype"),
        ([1.0], TypeError, "x: expected an array"),
        (batches[0][0, 0], ValueError, "x: expected at least 2 dimensions"),
    ]:
        with pytest.raises(error, match=message):
            layer(x)
    assert_same_state(layer.state_dict(), before)
    layer.backward(y)


def test_state_dict_through_a_file(batches, tmp_path):
    layer = cunorm.BatchNorm(4)
    layer(batches[0])
    layer.weight[...] = [1, 2, 3, 4]
    np.savez(tmp_path / "state.npz", **layer.state_dict())
    other = cunorm.BatchNorm(4)
    with np.load(tmp_path / "state.npz", allow_pickle=False) as state:
        other.load_state_dict(state)
    assert_same_state(other.state_dict(), layer.state_dict())
    np.testing.assert_array_equal(other.eval()(batches[1]), layer.eval()(batches[1]))


def test_state_dict_is_a_copy(batches):
    layer = cunorm.BatchNorm(4)
    state = layer.state_dict()
    kept = snapshot(layer)
    layer(batches[0])
    layer.weight += 1
    assert_same_state(state, kept)
    layer.load_state_dict(state)
    layer(batches[0])
    assert_same_state(state, kept)


def test_pytorch_names_and_dtypes():
    """The five names of torch.nn.BatchNorm2d, float64 values into a float32 layer."""
    state = {
        "weight": np.arange(3.0),
        "bias": np.arange(3.0) + 1,
        "running_mean": np.arange(3.0) + 2,
        "running_var": np.arange(3.0) + 3,
        "num_batches_tracked": np.array(7, np.int64),
    }
    layer = cunorm.BatchNorm(3)
    layer.load_state_dict(state)
    assert layer.running_var.tolist() == [3, 4, 5]
    assert layer.weight.dtype == np.float32
    assert layer.num_batches_tracked == 7
    del state["num_batches_tracked"]  # absent in old files
    layer.load_state_dict(state)
    assert layer.num_batches_tracked == 0
    layer.load_state_dict(state | {"num_batches_tracked": 3})
    assert layer.num_batches_tracked == 3
    for narrow in (7, np.int8(7), np.array(7, np.int8)):  # put in by somebody
        layer.num_batches_tracked = narrow
        assert layer.state_dict()["num_batches_tracked"] == 7
        layer.load_state_dict(state | {"num_batches_tracked": 300})
        assert layer.num_batches_tracked == 300
    layer.load_state_dict(layer.state_dict() | {"weight": layer.bias, "bias": layer.weight})
    assert layer.weight.tolist() == [1, 2, 3]
    assert layer.bias.tolist() == [0, 1, 2]
    for wrong in ("state.npz", None, [1]):
        with pytest.raises(TypeError, match="state: expected a mapping of names to arrays, got"):
            layer.load_state_dict(wrong)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bias": None}, ValueError, r"missing \['bias'\], unknown \[\]"),
        ({"gamma": np.zeros(4)}, ValueError, r"missing \[\], unknown \['gamma'\]"),
        ({"running_var": np.zeros(5)}, ValueError, r"state\['running_var'\]: expected shape"),
        ({"running_var": np.zeros(4, int)}, TypeError, r"state\['running_var'\]: expected dtype"),
        ({"running_var": [1.0] * 4}, TypeError, r"state\['running_var'\]: expected an array"),
        ({"running_var": None, "bias": None}, ValueError, r"missing \['bias', 'running_var'\]"),
        (
            {"num_batches_tracked": np.zeros(())},
            TypeError,
            "num_batches_tracked.*an integer, got dtype",
        ),
        ({"num_batches_tracked": -1}, ValueError, "num_batches_tracked.*expected 0 to"),
        ({"num_batches_tracked": np.zeros(1, int)}, ValueError, r"expected shape \(\), got \(1,\)"),
        ({"num_batches_tracked": 1 << 80}, ValueError, "num_batches_tracked.*expected 0 to"),
        (
            {"num_batches_tracked": "7"},
            TypeError,
            r"state\['num_batches_tracked'\]: expected an arr",
        ),
        ({1: np.zeros(4), b"x": 0}, ValueError, r"unknown \[1, b'x'\]"),
        ({f"layer{i}.bias": 0 for i in range(99)}, ValueError, "'layer15.bias'] and 91 more"),
        ({"weight": np.zeros((4, 1))}, ValueError, r"state\['weight'\]: expected shape \(4,\)"),
        ({"weight": np.zeros(4, complex)}, TypeError, r"state\['weight'\]: .*complex128"),
        ({"weight": np.array([None] * 4)}, TypeError, r"state\['weight'\]: .*object"),
        ({"weight": np.array(["1.0"] * 4)}, TypeError, r"state\['weight'\]: .*<U3"),
        ({"weight": np.zeros(4, "f4,f4")}, TypeError, r"state\['weight'\]: expected dtype"),
        ({"weight": np.zeros(4, "V3")}, TypeError, r"state\['weight'\]: expected dtype"),
        ({"weight": np.ma.zeros(4)}, TypeError, r"state\['weight'\]: .*masked"),
        ({"weight": {"weight": 0}}, TypeError, r"state\['weight'\]: expected an array.*got dict"),
        ({"weight": np.float32}, TypeError, r"state\['weight'\]: expected an array.*got type"),
    ],
)
def test_bad_state(batches, changes, error, message):
    layer = cunorm.BatchNorm(4)
    layer(batches[0])
    before = snapshot(layer)
    state = {n: v for n, v in (cunorm.BatchNorm(4).state_dict() | changes).items() if v is not None}
    with pytest.raises(error, match=message):
        layer.load_state_dict(state)
    assert_same_state(layer.state_dict(), before)


class Trap:
    """Unpickling it is noticed."""

    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def test_spoilt_files(batches, tmp_path):
    """What a file of weights holds is data: nothing in it is run, and half of it is not loaded."""
    layer = cunorm.BatchNorm(4)
    layer(batches[0])
    before = snapshot(layer)
    path = tmp_path / "state.npz"
    np.savez(path, **cunorm.BatchNorm(4).state_dict() | {"running_var": np.array([Trap()] * 4)})
    with np.load(path) as state, pytest.raises(ValueError, match="allow_pickle=False"):
        layer.load_state_dict(state)
    assert not Trap.sprung
    np.savez(path, **cunorm.BatchNorm(4).state_dict())
    content = path.read_bytes()
    ones = np.ones(4, np.float32).tobytes()
    path.write_bytes(content.replace(ones, b"\xff" + ones[1:]))
    with np.load(path) as state, pytest.raises(zipfile.BadZipFile):
        layer.load_state_dict(state)
    assert_same_state(layer.state_dict(), before)


def test_read_only_array_of_a_layer(batches):
    """Is found before anything is loaded."""
    layer = cunorm.BatchNorm(4)
    layer(batches[0])
    layer.running_var.flags.writeable = False
    before = snapshot(layer)
    with pytest.raises(ValueError, match="running_var: expected a writable array"):
        layer.load_state_dict(cunorm.BatchNorm(4).state_dict())
    assert_same_state(layer.state_dict(), before)


@pytest.mark.parametrize("value", [None, [3], "3", np.zeros(2, int), np.array(1.5), -1])
def test_bad_number_of_batches(batches, value):
    """Is found before the running statistics move."""
    layer = cunorm.BatchNorm(4)
    layer.num_batches_tracked = value
    mean = layer.running_mean.copy()
    with pytest.raises((TypeError, ValueError), match="num_batches_tracked: expected"):
        layer(batches[0])
    np.testing.assert_array_equal(layer.running_mean, mean)
    layer.num_batches_tracked = np.array(7)
    layer.num_batches_tracked.flags.writeable = False  # a new one takes its place
    layer(batches[0])
    assert layer.num_batches_tracked == 8


def test_moving_what_cannot_be_moved(batches):
    """Leaves everything where it was."""
    layer = cunorm.BatchNorm(4)
    y = layer(batches[0])
    weight, layer.running_var = layer.weight, [1.0] * 4
    with pytest.raises(TypeError, match="running_var: expected an array"):
        layer.to("cpu")
    assert layer.weight is weight
    assert layer.backward(y) is not None


def test_assigned_parameters():
    """Are arrays; those that cannot be written are copied."""
    weight = np.ones((4, 4, 1, 1), np.float32)
    weight.flags.writeable = False
    layer = cunorm.ConvBatchNorm(4, 4, 1)
    layer.conv_weight = weight
    layer.conv_weight += 1
    assert (weight == 1).all()
    for name in ("conv_weight", "weight", "bias"):
        with pytest.raises(TypeError, match=f"^{name}: expected an array"):
            setattr(layer, name, "w")


def test_bias_of_a_norm_without():
    with pytest.raises(AttributeError, match="bias: RMSNorm has none"):
        cunorm.RMSNorm(4).bias = np.zeros(4)


def test_copies_of_layers(batches):
    """Copied and pickled, as they are, between forward and backward, too."""
    for layer in (*layers(), cunorm.BatchNorm(4), cunorm.ConvBatchNorm(4, 4, 1, rng=0)):
        x = batches[0][..., None] if isinstance(layer, cunorm.ConvBatchNorm) else batches[0]
        y = layer(x)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert repr(copied) == repr(layer)
            assert_same_state(copied.state_dict(), layer.state_dict())
            dx = copied.backward(y)
            copied.weight += 1
            assert not np.array_equal(copied.weight, layer.weight)
        np.testing.assert_array_equal(dx, layer.backward(y))
        for name, gradient in layer.gradients.items():
            np.testing.assert_array_equal(copied.gradients[name], gradient)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", np.float64, ml_dtypes.bfloat16])
def test_dtype(dtype, rng, tmp_path):
    layer = cunorm.BatchNorm(4, dtype=dtype, channel_axis=-1)
    wide = np.float64 if dtype == np.float64 else np.float32
    assert layer.running_mean.dtype == layer.running_var.dtype == wide
    x = rng.standard_normal((6, 5, 4)).astype(layer.weight.dtype)
    assert layer(x).dtype == x.dtype
    layer.backward(x)
    assert layer.gradients["bias"].dtype == x.dtype
    np.savez(tmp_path / "state.npz", **layer.state_dict())
    other = cunorm.BatchNorm(4, dtype=dtype)
    with np.load(tmp_path / "state.npz") as state:
        other.load_state_dict(state)
    assert_same_state(other.state_dict(), layer.state_dict())


def test_devices():
    layer = cunorm.BatchNorm(4)
    assert layer.to("cpu") is layer
    with pytest.raises(ValueError, match='device: expected "cpu" or "cuda"'):
        layer.to("tpu")
    if not cunorm.is_available("cuda"):
        with pytest.raises(RuntimeError, match=r"device: the CUDA backend is missing: (CuPy|no) "):
            layer.to("cuda")


def test_bad_arguments():
    for arguments, error, message in [
        ({"num_features": -1}, ValueError, "num_features: expected at least 0"),
        ({"num_features": 2.0}, TypeError, "num_features: expected an integer"),
        ({"eps": -1}, ValueError, "eps: expected"),
        ({"exponential_average_factor": "sometimes"}, ValueError, '1 or "cumulative", got'),
        ({"affine": "no"}, TypeError, "affine: expected True or False, got 'no'"),
        ({"track_running_statistics": None}, TypeError, "track_running_statistics: expected True"),
        ({"exponential_average_factor": 2}, ValueError, "exponential_average_factor"),
        ({"exponential_average_factor": "cumulative", "momentum": 0.9}, ValueError, "one of them"),
        ({"correction": -1}, ValueError, "correction: expected"),
        ({"channel_axis": "last"}, TypeError, "channel_axis: expected an integer"),
        ({"dtype": np.int32}, TypeError, "dtype: expected float16"),
        ({"dtype": "float128x"}, TypeError, "dtype: expected float16"),
        ({"dtype": None}, TypeError, "dtype: expected float16"),
    ]:
        with pytest.raises(error, match=message):
            cunorm.BatchNorm(**{"num_features": 3} | arguments)


def test_repr():
    assert repr(cunorm.BatchNorm(3, momentum=0.99)) == (
        "BatchNorm(3, eps=1e-05, exponential_average_factor=0.01, correction=1, affine=True, "
        "track_running_statistics=True, channel_axis=1, dtype=float32, training=True, frozen=False)"
    )


# --- the layers of the other norms --------------------------------------------


def layers(**options):
    """One of each, for x of shape (6, 4, 5)."""
    return [
        cunorm.LayerNorm((4, 5), **options),
        cunorm.RMSNorm(5, **options),
        cunorm.GroupNorm(2, 4, **options),
        cunorm.InstanceNorm(4, **options),
        cunorm.InstanceNorm(4, track_running_statistics=True, **options),
        cunorm.ScaleShift(4, **options),
    ]


def by_function(layer, x, dy):
    """y and the gradients of a layer in training, from the functions."""
    weight, bias = layer.weight, layer.bias
    match type(layer).__name__:
        case "LayerNorm":
            y, saved = cunorm.layer_norm_forward(x, weight, bias, axis=-2)
            return y, *cunorm.layer_norm_backward(dy, x, saved, weight)
        case "RMSNorm":
            y, saved = cunorm.rms_norm_forward(x, weight)
            return y, *cunorm.rms_norm_backward(dy, x, saved, weight)
        case "GroupNorm":
            y, saved = cunorm.group_norm_forward(x, 2, weight, bias)
            return y, *cunorm.group_norm_backward(dy, x, saved, weight)
        case "InstanceNorm":
            y, saved = cunorm.instance_norm_forward(x, weight, bias)
            return y, *cunorm.instance_norm_backward(dy, x, saved, weight)
        case _:
            y = cunorm.scale_shift_forward(x, weight, bias)
            return y, *cunorm.scale_shift_backward(dy, x, weight)


def test_every_layer_is_its_functions(batches, rng):
    for layer in layers():
        for parameter in layer.parameters.values():
            parameter[...] = rng.standard_normal(parameter.shape)
        x, dy = batches[:2]
        y, dx, *gradients = by_function(layer, x, dy)
        np.testing.assert_array_equal(layer(x), y)
        np.testing.assert_array_equal(layer.backward(dy), dx)
        assert list(layer.gradients) == list(layer.parameters)
        for actual, expected in zip(layer.gradients.values(), gradients, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_every_layer_trains(rng):
    """Gradient descent finds the parameters that made the data."""
    x = rng.standard_normal((6, 4, 5)).astype(np.float32)
    for layer, other in zip(layers(), layers(), strict=True):
        for parameter in other.parameters.values():
            parameter[...] = rng.uniform(0.5, 1.5, parameter.shape)
        target = other(x)
        for _ in range(300):
            layer.backward((layer(x) - target) / len(x))
            for name, parameter in layer.parameters.items():
                parameter -= 0.3 * layer.gradients[name]
        np.testing.assert_allclose(layer(x), target, atol=2e-3)


def test_every_layer_needs_forward_before_backward(batches):
    for layer in layers():
        with pytest.raises(RuntimeError, match="backward: expected a call of forward before each"):
            layer.backward(batches[0])
        layer(batches[0])
        with pytest.raises(ValueError, match="dy: expected the shape of x"):
            layer.backward(batches[0][:2])
        layer.backward(batches[0])  # the failed call changed nothing
        with pytest.raises(RuntimeError, match="backward: expected a call of forward before each"):
            layer.backward(batches[0])


def test_every_layer_freezes(batches):
    for layer in layers():
        layer(batches[0])
        layer.backward(batches[0])
        assert layer.gradients
        before = snapshot(layer)
        assert layer.freeze() is layer
        assert layer.train() is layer
        assert layer.parameters == layer.gradients == {}
        layer(batches[1])
        layer.backward(batches[1])
        assert layer.parameters == layer.gradients == {}
        assert_same_state(layer.state_dict(), before)
        assert layer.unfreeze().parameters
        layer(batches[1])
        layer.backward(batches[1])
        assert layer.gradients.keys() == layer.parameters.keys()


def test_every_state_dict(batches, tmp_path):
    names = [
        ["weight", "bias"],
        ["weight"],
        ["weight", "bias"],
        ["weight", "bias"],
        ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"],
        ["weight", "bias"],
    ]
    for layer, other, expected in zip(layers(), layers(), names, strict=True):
        layer(batches[0])
        for parameter in layer.parameters.values():
            parameter += 0.5
        assert list(layer.state_dict()) == expected
        np.savez(tmp_path / "state.npz", **layer.state_dict())
        with np.load(tmp_path / "state.npz", allow_pickle=False) as state:
            other.load_state_dict(state)
        assert_same_state(other.state_dict(), layer.state_dict())
        state = {n.replace("weight", "gamma"): v for n, v in layer.state_dict().items()}
        with pytest.raises(ValueError, match=r"missing \['weight'\], unknown \['gamma'\]"):
            layer.load_state_dict(state)
        assert layer.to("cpu") is layer
        with pytest.raises(ValueError, match='device: expected "cpu" or "cuda"'):
            layer.to("tpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", np.float64])
def test_every_dtype(dtype, rng):
    for layer in layers(dtype=dtype):
        x = rng.standard_normal((6, 4, 5)).astype(layer.weight.dtype)
        assert layer(x).dtype == x.dtype
        layer.backward(x)
        assert {g.dtype for g in layer.gradients.values()} == {x.dtype}


def test_every_layer_without_parameters(batches):
    for layer in [
        cunorm.LayerNorm(5, affine=False),
        cunorm.RMSNorm(5, affine=False),
        cunorm.GroupNorm(2, 4, affine=False),
        cunorm.InstanceNorm(4, affine=False),
    ]:
        layer(batches[0])
        assert layer.backward(batches[0]).shape == batches[0].shape
        assert layer.parameters == layer.gradients == layer.state_dict() == {}


def test_channels_last(batches):
    x = np.ascontiguousarray(batches[0].transpose(0, 2, 1))
    for one, last in [
        (cunorm.GroupNorm(2, 4), cunorm.GroupNorm(2, 4, channel_axis=-1)),
        (cunorm.InstanceNorm(4), cunorm.InstanceNorm(4, channel_axis=-1)),
        (cunorm.ScaleShift(4), cunorm.ScaleShift(4, channel_axis=-1)),
    ]:
        np.testing.assert_allclose(last(x).transpose(0, 2, 1), one(batches[0]), atol=1e-5)
        dx = last.backward(x).transpose(0, 2, 1)
        np.testing.assert_allclose(dx, one.backward(batches[0]), atol=1e-5)


def test_rms_norm_with_an_offset(batches):
    """Starts as a scale of 1, whatever the offset."""
    plain, gemma = cunorm.RMSNorm(5), cunorm.RMSNorm(5, weight_offset=1.0)
    assert gemma.weight.tolist() == [0.0] * 5
    np.testing.assert_array_equal(gemma(batches[0]), plain(batches[0]))
    np.testing.assert_array_equal(gemma.backward(batches[0]), plain.backward(batches[0]))
    with pytest.raises(ValueError, match="weight_offset: expected 0 when affine is False"):
        cunorm.RMSNorm(5, affine=False, weight_offset=1)


def test_instance_norm_modes(batches):
    """Running statistics are used in eval and when frozen, updated in training only."""
    layer = cunorm.InstanceNorm(4, track_running_statistics=True)
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    for x in batches:
        layer(x)
        cunorm.instance_norm_forward(x, None, None, mean, var)
    np.testing.assert_array_equal([layer.running_mean, layer.running_var], [mean, var])
    assert layer.num_batches_tracked == 4
    layer(batches[0], update_statistics=False)
    layer(batches[0][:0])
    assert layer.num_batches_tracked == 4
    expected, _ = cunorm.instance_norm_forward(
        batches[0], layer.weight, layer.bias, mean, var, use_input_stats=False
    )
    np.testing.assert_array_equal(layer.eval()(batches[0]), expected)
    np.testing.assert_array_equal(layer.train().freeze()(batches[0]), expected)
    np.testing.assert_array_equal(layer.running_mean, mean)
    untracked = cunorm.InstanceNorm(4)
    np.testing.assert_array_equal(untracked(batches[0]), untracked.eval()(batches[0]))
    cumulative = cunorm.InstanceNorm(
        4, track_running_statistics=True, exponential_average_factor="cumulative"
    )
    for x in batches:
        cumulative(x)
    expected = np.mean([x.mean((0, 2)) for x in batches], 0)
    np.testing.assert_allclose(cumulative.running_mean, expected, rtol=1e-5)


def test_bad_arguments_and_inputs_of_every_layer(batches):
    for build, error, message in [
        (lambda: cunorm.LayerNorm(()), ValueError, "normalized_shape: expected at least one"),
        (lambda: cunorm.LayerNorm((3, -1)), ValueError, "normalized_shape: expected at least 0"),
        (lambda: cunorm.RMSNorm(2.0), TypeError, "normalized_shape: expected an integer"),
        (lambda: cunorm.RMSNorm(2, eps=-1), ValueError, "eps: expected"),
        (lambda: cunorm.RMSNorm(2, weight_offset=None), TypeError, "weight_offset: expected"),
        (lambda: cunorm.GroupNorm(3, 4), ValueError, "num_groups: .* 4 channels, got 3"),
        (lambda: cunorm.GroupNorm(0, 4), ValueError, "num_groups: .* 4 channels, got 0"),
        (lambda: cunorm.GroupNorm(1, -4), ValueError, "num_channels: expected at least 0"),
        (lambda: cunorm.InstanceNorm(-4), ValueError, "num_features: expected at least 0"),
        (lambda: cunorm.ScaleShift(1.5), TypeError, "num_features: expected an integer"),
        (lambda: cunorm.ScaleShift(3, dtype=int), TypeError, "dtype: expected float16"),
    ]:
        with pytest.raises(error, match=message):
            build()
    x = batches[0]
    for layer, message in [
        (cunorm.LayerNorm((4, 6)), r"x: .*normalized_shape \(4, 6\), got shape \(6, 4, 5\)"),
        (cunorm.LayerNorm((2, 6, 4, 5)), r"x: .*normalized_shape \(2, 6, 4, 5\), got shape"),
        (cunorm.RMSNorm(4), r"x: .*normalized_shape \(4,\), got shape \(6, 4, 5\)"),
        (cunorm.GroupNorm(1, 5), r"x: expected 5 channels at axis 1, got shape \(6, 4, 5\)"),
        (cunorm.InstanceNorm(5), r"x: expected 5 channels at axis 1, got shape \(6, 4, 5\)"),
        (cunorm.ScaleShift(5), r"x: expected 5 channels at axis 1, got shape \(6, 4, 5\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer(x)
        with pytest.raises(TypeError, match="x: expected an array"):
            layer([1.0])


def test_every_repr():
    assert [repr(layer) for layer in layers()] == [
        "LayerNorm((4, 5), eps=1e-05, affine=True, dtype=float32, frozen=False)",
        "RMSNorm((5,), eps=None, affine=True, weight_offset=0, dtype=float32, frozen=False)",
        "GroupNorm(2, 4, eps=1e-05, affine=True, channel_axis=1, dtype=float32, frozen=False)",
        *(
            "InstanceNorm(4, eps=1e-05, exponential_average_factor=0.1, correction=1, affine=True, "
            f"track_running_statistics={tracks}, channel_axis=1, dtype=float32, training=True, "
            "frozen=False)"
            for tracks in (False, True)
        ),
        "ScaleShift(4, channel_axis=1, dtype=float32, frozen=False)",
    ]


@pytest.mark.parametrize("factor", [0.1, "cumulative"])
def test_no_more_batches_can_be_counted(rng, factor):
    layer = cunorm.BatchNorm(3, exponential_average_factor=factor)
    layer.num_batches_tracked = np.array(2**63 - 1)
    with pytest.raises(ValueError, match=r"num_batches_tracked \+ 1: expected 1 to 2\^63 - 1, got"):
        layer.forward(rng.standard_normal((4, 3, 5)))
    np.testing.assert_array_equal(layer.running_mean, np.zeros(3))
