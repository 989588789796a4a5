"""Every argument check and its message.

A message names the argument, what it got and what it expected. Checks come
before anything is written, so a call that raises leaves everything as it was.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from numbers import Real
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from . import arrays

_FLOAT32: np.dtype = np.dtype(np.float32)
_FLOAT64: np.dtype = np.dtype(np.float64)

_BOOLEANS = frozenset((bool, np.bool_))

_ndarray = np.ndarray  # found sooner

Result = TypeVar("Result")

#: What the shape of a parameter or statistic means, in messages.
ONE_A_CHANNEL = "one value a channel"

_STATISTICS_DTYPES: dict[np.dtype, np.dtype] = {
    np.dtype(np.float16): _FLOAT32,
    _FLOAT32: _FLOAT32,
    _FLOAT64: _FLOAT64,
}


def statistics_dtype(dtype: np.dtype) -> np.dtype:
    """The accumulator type of an array type: float32, for float64 float64."""
    return _STATISTICS_DTYPES.get(dtype, _FLOAT32)


def _is_floating(dtype: np.dtype) -> bool:
    # bfloat16 is known by its name, so that ml_dtypes need not be imported.
    return dtype in _STATISTICS_DTYPES or (dtype.name == "bfloat16" and bool(dtype.isnative))


def shown(value: Any) -> str:
    """A value as a message shows it: arrays by their shape, nothing at length."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def once(check: Callable[..., Result]) -> Callable[..., Result]:
    """A check of hashable arguments that passes at once when the same have passed before.

    Its attribute `known` is quicker by a call, and raises TypeError for arguments without a hash.
    """
    passed = lru_cache(maxsize=1024, typed=True)(check)

    @wraps(check)
    def checked(*arguments: Any) -> Result:
        try:
            return passed(*arguments)
        except TypeError:  # which is raised too for arguments without a hash
            pass
        return check(*arguments)

    checked.known = passed  # type: ignore[attr-defined]
    return checked


def flag(name: str, value: Any) -> bool:
    """A boolean, and nothing that merely counts as one."""
    if value is True or value is False:  # as a rule
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def floating(name: str, dtype: np.dtype) -> None:
    """The dtype of an array is one that kernels exist for."""
    if not _is_floating(dtype):
        raise TypeError(
            f"{name}: expected dtype float16, bfloat16, float32 or float64 in native byte order, "
            f"got {dtype}"
        )


def floating_dtype(name: str, dtype: Any) -> np.dtype:
    """A dtype, or the name of one, that kernels exist for."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    known: np.dtype | None = None
    if dtype is not None:  # which to NumPy means float64
        with suppress(TypeError):
            known = np.dtype(dtype)
    if known is None or not _is_floating(known):
        raise TypeError(
            f"{name}: expected float16, bfloat16, float32 or float64, a NumPy dtype or its name, "
            f"got {dtype!r}"
        )
    return known


def present(name: str, array: Any) -> None:
    """An array that has to be given."""
    if array is None:
        raise TypeError(f"{name}: expected an array, got None")


@once
def channels(shape: tuple[int, ...], dtype: np.dtype, channel_axis: Any) -> tuple[int, int, int]:
    """(channel axis from the front, number of channels, elements a channel) of x."""
    channel_axis = integer("channel_axis", channel_axis)
    floating("x", dtype)
    ndim = len(shape)
    if ndim < 2:
        raise ValueError(f"x: expected at least 2 dimensions, got shape {shape}")
    if not -ndim <= channel_axis < ndim:
        raise ValueError(
            f"channel_axis: expected {-ndim} to {ndim - 1} for x of shape {shape}, "
            f"got {channel_axis}"
        )
    axis = channel_axis % ndim
    return axis, shape[axis], math.prod(shape[:axis]) * math.prod(shape[axis + 1 :])


def samples_first(axis: int, channel_axis: int, shape: tuple[int, ...]) -> None:
    """The channel axis, from the front, is not the samples'."""
    if axis == 0:
        raise ValueError(
            "channel_axis: expected another axis than 0, that of the samples, "
            f"got {channel_axis} for x of shape {shape}"
        )


def normalized_axes(shape: tuple[int, ...], dtype: np.dtype, axis: int) -> int:
    """The first axis that x is normalized over, from the front."""
    floating("x", dtype)
    ndim = len(shape)
    if ndim < 1:
        raise ValueError(f"x: expected at least 1 dimension, got shape {shape}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis: expected {-ndim} to {ndim - 1} for x of shape {shape}, got {axis}")
    return axis % ndim


def per_channel(
    number: int,
    dtype: np.dtype,
    *,
    weight: Any = None,
    bias: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
) -> None:
    """Parameters and running statistics with one value a channel."""
    shape = (number,)
    vectors = (weight, bias, running_mean, running_var)
    for array in vectors:  # as a rule
        if array is None:
            continue
        own = array.dtype
        if (own is not dtype and own is not _FLOAT32) or array.shape != shape:
            break
    else:
        return
    names = ("weight", "bias", "running_mean", "running_var")
    for name, array in zip(names, vectors, strict=True):
        parameter(name, array, shape, ONE_A_CHANNEL, dtype)


def are_usual(
    x: Any,
    shape: tuple[int, ...],
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    out: Any,
    *,
    written: bool,
) -> bool:
    """Whether the arguments of a forward call are what they are as a rule, and right.

    x has a usual backend; all are of its type then, x and `out` C-contiguous, the others float32
    and float64 ones (of a GPU's, of x's dtype too) of this `shape`, and what is `written` has
    memory of its own (of a GPU's, `out` may be x).
    `parameter`, `running_statistics` and `output` have nothing to say of these; they have the last
    word about all others.
    """
    kind = type(x)
    for array in (weight, bias, running_mean, running_var):
        if array is None:
            continue
        if type(array) is not kind or array.shape != shape:
            return False
        dtype = array.dtype
        if (
            dtype is not _FLOAT32
            and dtype is not _FLOAT64
            and (kind is _ndarray or dtype is not x.dtype)
        ):
            return False
    if out is not None and (
        type(out) is not kind or out.shape != x.shape or out.dtype is not x.dtype
    ):
        return False
    if kind is not _ndarray:
        source = None if out is x else x
        return _lie_as_usual_on_gpu(
            x, 3 if written else 1, out, running_mean, running_var, source, weight, bias
        )
    if not x.flags.carray:
        return False
    if (
        written
        and (running_mean is not None or running_var is not None)
        and not _has_own_memory(running_mean, running_var, (x, weight, bias))
    ):
        return False
    return out is None or _has_own_memory(out, None, (x, weight, bias, running_mean, running_var))


def are_usual_in_backward(
    dy: Any,
    x: Any,
    statistics: tuple[Any, ...],
    weight: Any,
    bias_dtype: Any,
    out: Any,
    layout: Any,
) -> bool:
    """Whether the arguments of a backward call are what they are as a rule, and right.

    x has a usual backend; all are of its type then, dy, x, `out` and what was saved, the
    `statistics`, C-contiguous, the parameters as in a forward call, and `out` has memory of its
    own (of a GPU's, it may be dy or x). Of the statistics any may be None.
    """
    kind, dtype, whole = type(x), x.dtype, x.shape
    on_cpu = kind is _ndarray
    if type(dy) is not kind or dy.dtype is not dtype or dy.shape != whole:
        return False
    if (
        bias_dtype is not None
        and bias_dtype is not _FLOAT32
        and bias_dtype is not _FLOAT64
        and (on_cpu or bias_dtype is not dtype)
    ):
        return False
    wide = _STATISTICS_DTYPES.get(dtype, _FLOAT32)
    shape = layout.statistics_shape
    for array in statistics:
        if array is not None and (
            type(array) is not kind
            or array.dtype is not wide
            or array.shape != shape
            or (on_cpu and not array.flags.carray)
        ):
            return False
    if weight is not None:
        if type(weight) is not kind or weight.shape != layout.parameters_shape:
            return False
        own = weight.dtype
        if own is not _FLOAT32 and own is not _FLOAT64 and (on_cpu or own is not dtype):
            return False
    if out is not None and (type(out) is not kind or out.shape != whole or out.dtype is not dtype):
        return False
    if on_cpu:
        return (
            x.flags.carray
            and dy.flags.carray
            and (out is None or _has_own_memory(out, None, (dy, x, weight, *statistics)))
        )
    sources = (None if out is one else one for one in (dy, x))
    return _lie_as_usual_on_gpu(x, 1, out, *sources, weight, *statistics)


def _lie_as_usual_on_gpu(x: Any, written: int, *given: Any) -> bool:
    """Whether arrays of CuPy's are C-contiguous, aligned and on the GPU of x.

    The first of them, as many as are `written`, lie apart from all others then.
    """
    device = x.data.device_id
    spans: list[tuple[int, int]] = []
    for number, array in enumerate(given):
        if array is None:
            continue
        data = array.data
        first = data.ptr
        if data.device_id != device or not array._c_contiguous or first % array.itemsize:
            return False
        if number >= written and not spans:
            continue
        end = first + array.nbytes
        for begin, stop in spans:
            if first < stop and begin < end:
                return False
        if number < written:
            spans.append((first, end))
    return True


def parameter(
    name: str, array: np.ndarray | None, shape: tuple[int, ...], meaning: str, dtype: np.dtype
) -> None:
    """A parameter or running statistic, in a dtype fit for the data.

    Half types are fit for data of the same type only.
    """
    if array is None:
        return
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, {meaning}, got {array.shape}")
    own = array.dtype
    if own is dtype or own is _FLOAT32:  # as a rule
        return
    if own != dtype and own != _FLOAT32 and own != _FLOAT64:
        half = "" if dtype in (_FLOAT32, _FLOAT64) else f"{dtype} (that of the data), "
        raise TypeError(f"{name}: expected dtype {half}float32 or float64, got {own}")


def statistic(
    name: str, array: np.ndarray | None, shape: tuple[int, ...], meaning: str = ONE_A_CHANNEL
) -> None:
    """A statistic, of any floating type."""
    if array is None:
        raise TypeError(f"{name}: expected an array of shape {shape}, got None")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, {meaning}, got {array.shape}")
    if array.dtype is not _FLOAT32:  # as a rule
        floating(name, array.dtype)


def writable(name: str, array: np.ndarray | None) -> None:
    """The array can be written: it is not read-only and no two elements share memory."""
    if array is None:
        return
    flags = array.flags
    if not getattr(flags, "writeable", True):  # CuPy's arrays always are
        raise arrays.read_only_error(name)
    if flags.c_contiguous or flags.f_contiguous:
        return
    reach = array.itemsize
    for stride, size in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(
                f"{name}: expected elements apart from each other, got strides {array.strides}"
            )
        reach += stride * (size - 1)


def output(
    out: np.ndarray, like: np.ndarray, may_be: Sequence[str], **inputs: np.ndarray | None
) -> None:
    """``out`` has shape and dtype of ``like`` and lies apart from the inputs.

    It may be the very same array as one of those named in ``may_be``.
    """
    if out.shape != like.shape:
        raise ValueError(f"out: expected shape {like.shape}, got {out.shape}")
    if out.dtype != like.dtype:
        raise TypeError(f"out: expected dtype {like.dtype}, got {out.dtype}")
    if _has_own_memory(out, None, inputs.values()):
        return
    writable("out", out)
    for name, array in inputs.items():
        if array is None or not arrays.may_overlap(out, array):
            continue
        if name in may_be and _is_same(array, out):
            continue
        if arrays.overlap(out, array):
            same = f" unless it is {name} itself" if name in may_be else ""
            raise ValueError(
                f"out: expected memory apart from {name}{same}, got an array that overlaps it"
            )


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape and dtype have the same elements at the same places."""
    a, b = arrays.header(a), arrays.header(b)
    if a.__array_interface__["data"][0] != b.__array_interface__["data"][0]:
        return False
    places = zip(a.strides, b.strides, a.shape, strict=True)
    return all(left == right for left, right, size in places if size > 1)


def same_as_input(name: str, array: np.ndarray | None, x: np.ndarray) -> None:
    """A gradient has shape and dtype of x."""
    present(name, array)
    assert array is not None
    if array.shape != x.shape:
        raise ValueError(f"{name}: expected the shape of x, {x.shape}, got {array.shape}")
    if array.dtype is not x.dtype and array.dtype != x.dtype:
        raise TypeError(f"{name}: expected the dtype of x, {x.dtype}, got {array.dtype}")


def gradient_output(
    out: np.ndarray, want_dx: bool, dy: np.ndarray, x: np.ndarray, **inputs: np.ndarray | None
) -> None:
    """``out`` receives dx; it may be dy or x itself."""
    if not want_dx:
        raise ValueError("out: expected None, since output_mask leaves out dx, got an array")
    output(out, x, ("x", "dy"), dy=dy, x=x, **inputs)


def saved_by(function: str, kind: type, saved: Any) -> None:
    """What a forward function returned."""
    if not isinstance(saved, kind):
        pair = isinstance(saved, tuple) and len(saved) == 2 and isinstance(saved[1], kind)
        got = f"a pair (y, {kind.__name__})" if pair else type(saved).__name__
        raise TypeError(f"saved: expected the {kind.__name__} that {function} returned, got {got}")


def integer(name: str, value: Any) -> int:
    """A Python or NumPy integer."""
    if type(value) is int:  # as a rule
        return value
    if not isinstance(value, (bool, np.bool_, np.ndarray)):
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name}: expected an integer, got {shown(value)}")


def _real(name: str, value: Any, expected: str) -> float:
    if type(value) is not float and (
        isinstance(value, (bool, np.bool_)) or not isinstance(value, Real)
    ):
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected {expected}, got one too large for a float") from None


def not_negative(name: str, value: Any) -> float:
    """A finite number of at least zero."""
    if type(value) is float and 0.0 <= value < math.inf:  # as a rule
        return value
    number = _real(name, value, "a number of at least 0")
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}")
    return number


def finite(name: str, value: Any) -> float:
    """A finite number."""
    number = _real(name, value, "a number")
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return number


def _fraction(name: str, value: Any) -> float:
    if type(value) is float and 0.0 <= value <= 1.0:  # as a rule
        return value
    number = _real(name, value, "a number from 0 to 1")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value!r}")
    return number


def running_statistics(
    place: arrays.Place,
    running_mean: Any,
    running_var: Any,
    *,
    x: Any = None,
    conv_weight: Any = None,
    weight: Any = None,
    bias: Any = None,
) -> None:
    """Running statistics that are written: writable, and apart from each other and the inputs."""
    for name in place.read_only:
        if name in ("running_mean", "running_var"):
            raise arrays.read_only_error(name)
    if running_mean is running_var is None:
        return
    if _has_own_memory(running_mean, running_var, (x, conv_weight, weight, bias)):
        return
    inputs = {"x": x, "conv_weight": conv_weight, "weight": weight, "bias": bias}
    _apart("running_mean", running_mean, inputs)
    _apart("running_var", running_var, {"running_mean": running_mean, **inputs})
    writable("running_mean", running_mean)
    writable("running_var", running_var)


def _has_own_memory(written: Any, second: Any, inputs: Iterable[Any]) -> bool:
    """Whether a NumPy array, or two, can be written and lie apart from each other and the inputs.

    A quick answer for the usual case; False may mean anything.
    """
    if type(written) is not np.ndarray or written is second:
        return False
    flags = written.flags
    if not (flags.owndata and flags.carray):
        return False
    if second is not None:
        if type(second) is not np.ndarray:
            return False
        flags = second.flags
        if not (flags.owndata and flags.carray):
            return False
    for array in inputs:
        if array is None:
            continue
        owner = array.base
        if owner is None:
            owner = array
        elif type(owner) is not np.ndarray or owner.base is not None:
            return False
        if owner is written or owner is second:
            return False
    return True


def _apart(name: str, array: Any, others: dict[str, Any]) -> None:
    if array is None:
        return
    for other, used in others.items():
        if used is not None and arrays.may_overlap(array, used) and arrays.overlap(array, used):
            raise ValueError(
                f"{name}: expected memory apart from {other}, got an array that overlaps it"
            )


def averaging_factor(momentum: Any, exponential_average_factor: Any) -> float:
    """Weight of the new batch in the running statistics, from either way to give it.

    A warning points to who called this package.
    """
    if momentum is None:
        if exponential_average_factor is None:
            return 0.1
        return _fraction("exponential_average_factor", exponential_average_factor)
    if exponential_average_factor is not None:
        raise ValueError(
            "momentum and exponential_average_factor: expected one of them at most, "
            f"got {momentum!r} and {exponential_average_factor!r}; "
            "momentum is 1 - exponential_average_factor"
        )
    kept = _fraction("momentum", momentum)
    if kept < 0.5:
        warnings.warn(
            f"momentum={momentum!r} is the weight kept on the old running statistics (Keras' "
            "convention); PyTorch calls the weight of the new batch momentum. For PyTorch's "
            f"meaning pass exponential_average_factor={momentum!r}",
            UserWarning,
            stacklevel=_frames_of_this_package(),
        )
    return 1.0 - kept


def _frames_of_this_package() -> int:
    """How many frames up, from where this is called, is the first one of other code."""
    frame: FrameType | None = sys._getframe(1)
    package, number = __name__.partition(".")[0], 1
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame, number = frame.f_back, number + 1
    return number


def mask(output_mask: Any, *names: str) -> tuple[bool, ...]:
    """A boolean for each of the gradients named."""
    if type(output_mask) is tuple and len(output_mask) == len(names):
        for value in output_mask:
            if value is not True and value is not False:
                break
        else:  # as a rule
            return output_mask
    try:
        wanted = tuple(output_mask)
    except TypeError:
        wanted = ()
    if len(wanted) != len(names) or not _BOOLEANS.issuperset(map(type, wanted)):
        number = {2: "two", 3: "three", 4: "four"}[len(names)]
        raise ValueError(
            f"output_mask: expected {number} booleans, for {', '.join(names[:-1])} and "
            f"{names[-1]}, got {shown(output_mask)}"
        )
    return tuple(map(bool, wanted))


def number_of_values(name: str, value: Any, least: int) -> int:
    """A count of values, at least `least`, that fits 64 bits."""
    number = integer(name, value)
    if not least <= number < 2**63:
        raise ValueError(f"{name}: expected {least} to 2^63 - 1, got {shown(number)}")
    return number


def several_values(count: int, shape: tuple[int, ...]) -> None:
    """A variance can be taken: there is more than one value a channel."""
    if count == 1:
        raise ValueError(
            "x: expected more than 1 value per channel when training, "
            f"got input shape {shape}; take a larger batch, or the running statistics "
            "(training=False, eval())"
        )


def several_values_of_all_ranks(count: int) -> None:
    """A variance can be taken: all ranks together have more than one value a channel."""
    if count == 1:
        raise ValueError(
            "x: expected more than 1 value per channel on all ranks together when training, got 1; "
            "take larger batches, or the running statistics (eval())"
        )


def several_values_a_group(size: int, shape: tuple[int, ...], num_groups: int) -> None:
    """A variance can be taken: a group of a sample has more than one value, if there are any."""
    if size == shape[0] * num_groups and size > 0:
        raise ValueError(
            "x: expected more than 1 value per group of a sample, "
            f"got input shape {shape} with {num_groups} groups"
        )


def several_spatial_values(count: int, shape: tuple[int, ...]) -> None:
    """A variance can be taken: a channel of a sample has more than one value."""
    if count == 1:
        raise ValueError(
            "x: expected more than 1 spatial value per channel when normalizing with the "
            f"input's own statistics, got input shape {shape}; take the running statistics "
            "(use_input_stats=False, eval())"
        )


def groups(num_groups: int, channels: int) -> None:
    """Channels can be divided into this many groups."""
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"num_groups: expected a positive divisor of the {channels} channels, got {num_groups}"
        )


def correctable(count: int, correction: float) -> None:
    """The variance's divisor, count - correction, is positive."""
    if count <= correction:
        raise ValueError(
            f"correction: expected less than the {count} values a channel that the variance "
            f"is taken over, got {correction:g}"
        )
