"""What the layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Self

import numpy as np

from .. import arrays, checks
from ..arrays import Array

__all__ = ["Layer", "TrackingLayer"]

_INT64 = np.dtype(np.int64)
_MOST_BATCHES = 2**63 - 1  # that can be counted


class Layer:
    """Parameters, their gradients, modes and state of a norm with forward and backward.

    A norm's own class computes: its ``forward`` ends with ``_keep``.
    """

    forward: Callable[..., Array]

    #: Names of the arrays in a state dict, as far as the layer has them.
    _names: tuple[str, ...] = ("weight", "bias")

    #: Names of the gradients that the norm's backward function returns after dx.
    _trained: tuple[str, ...] = ("weight", "bias")

    def __init__(self) -> None:
        self.training = True
        self.frozen = False
        self._cache: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._parameters: dict[str, Array] = {}
        self._gradients: dict[str, Array] = {}

    def _dtype(self) -> Any:
        return self.weight.dtype if self.weight is not None else None

    @property
    def weight(self) -> Array | None:
        """What normalized values are multiplied by; None without."""
        return self._parameters.get("weight")

    @weight.setter
    def weight(self, value: Array) -> None:
        self._parameters["weight"] = arrays.own("weight", value)

    @property
    def bias(self) -> Array | None:
        """What is added to the scaled values; None without."""
        return self._parameters.get("bias")

    @bias.setter
    def bias(self, value: Array) -> None:
        if "bias" not in self._names:
            raise AttributeError(f"bias: {type(self).__name__} has none")
        self._parameters["bias"] = arrays.own("bias", value)

    @property
    def parameters(self) -> dict[str, Array]:
        """The arrays to train, by their names, ``weight`` and ``bias``; none when frozen.

        The dict is the layer's own: change the arrays in place, or put others in it.
        """
        return {} if self.frozen else self._parameters

    @property
    def gradients(self) -> dict[str, Array]:
        """What the last ``backward`` found for `parameters`, by the same names.

        Arrays of NumPy or CuPy, as the parameters are, whatever library x is from.
        """
        return self._gradients

    def __call__(self, x: Array, **options: Any) -> Array:
        """The same as ``forward``."""
        return self.forward(x, **options)

    def _keep(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
        """Keep what ``backward`` calls: function(dy, *inputs, weight, **options)."""
        self._cache = function, inputs, options

    def backward(self, dy: Array) -> Array:
        """Gradient with respect to x of the last ``forward``; sets `gradients`.

        Afterwards the layer lets go of x and of the saved statistics.

        Parameters
        ----------
        dy : array
            Gradient with respect to y: its shape and dtype.

        Returns
        -------
        dx : array
            Shape, dtype and memory order of x.

        Raises
        ------
        RuntimeError
            Without a ``forward`` before, or for the second time after one.
        ValueError, TypeError
            As the norm's backward function; the layer is as it was then.
        """
        if self._cache is None:
            raise RuntimeError("backward: expected a call of forward before each call, got none")
        function, inputs, options = self._cache
        trains = [name in self.parameters for name in self._trained]
        dx, *found = function(dy, *inputs, self.weight, output_mask=(True, *trains), **options)
        named = zip(self._trained, found, strict=False)  # there may be no bias
        self._gradients = {
            name: arrays.own(name, a) if arrays.usual_backend(a) is None else a  # as a rule
            for name, a in named
            if a is not None
        }
        self._cache = None
        return dx

    def train(self) -> Self:
        """Set `training`: use the data's own statistics."""
        self.training = True
        return self

    def eval(self) -> Self:
        """Unset `training`: use running statistics, where there are any."""
        self.training = False
        return self

    def freeze(self) -> Self:
        """Make the parameters constants: there are no `parameters` to train until `unfreeze`."""
        self.frozen = True
        self._gradients = {}
        return self

    def unfreeze(self) -> Self:
        """Undo `freeze`."""
        self.frozen = False
        return self

    def to(self, device: str) -> Self:
        """Move parameters and running statistics to ``"cpu"`` or ``"cuda"``, the current GPU.

        They become NumPy or CuPy arrays, `gradients` are dropped, and so is what a
        ``forward`` kept. `num_batches_tracked` stays on the CPU, where reading it need not
        wait for a GPU.

        Raises
        ------
        ValueError
            For any other name.
        RuntimeError
            If that backend is missing here; says why.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f'device: expected "cpu" or "cuda", got {device!r}')
        missing = arrays.cuda_missing() if device == "cuda" else None
        if missing is not None:
            raise RuntimeError(f"device: the CUDA backend is missing: {missing}")
        names = [name for name in self._state() if name != "num_batches_tracked"]
        moved = {n: arrays.move(arrays.own(n, getattr(self, n)), device) for n in names}
        for name, array in moved.items():
            setattr(self, name, array)
        self._gradients = {}
        self._cache = None
        return self

    def state_dict(self) -> dict[str, Array]:
        """Copies of parameters and running statistics, under PyTorch's names.

        ``weight, bias, running_mean, running_var, num_batches_tracked``, as far
        as the layer has them, as NumPy arrays wherever the layer is; ready for
        ``numpy.savez``.
        """
        return {
            name: array.copy() if isinstance(array, np.ndarray) else array.get()
            for name, array in self._state().items()
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take parameters and running statistics from arrays under PyTorch's names.

        Values are copied and cast to the layer's dtypes (``num_batches_tracked`` is an
        integer). Arrays of a PyTorch state dict, of ``numpy.load`` and of `state_dict` will
        do; a missing ``num_batches_tracked`` counts as 0. In a whole network's state dict the
        names have the module's before them ("bn1.weight"): take that off first.

        Raises
        ------
        ValueError
            For missing or unknown names and wrong shapes, and if an array of the layer has been
            made read-only; nothing has been loaded then.
        TypeError
            For what is no mapping to floating-point arrays; nothing has been loaded then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"state: expected a mapping of names to arrays, got {type(state).__name__}"
            )
        own = self._state()
        given = {name: state[name] for name in state}
        if "num_batches_tracked" in own:
            given.setdefault("num_batches_tracked", np.zeros((), np.int64))
        if given.keys() != own.keys():
            missing = _listed(own.keys() - given.keys())
            unknown = _listed(given.keys() - own.keys())
            raise ValueError(
                f"state: expected the names {sorted(own)}; missing {missing}, unknown {unknown}"
            )
        for name, array in own.items():
            if name != "num_batches_tracked" and not getattr(array.flags, "writeable", True):
                raise arrays.read_only_error(name)
        loaded = {name: self._checked(name, array, given[name]) for name, array in own.items()}
        for name, array in own.items():
            if name == "num_batches_tracked":
                self.num_batches_tracked = loaded[name]
                continue
            with np.errstate(all="ignore"):
                if isinstance(array, np.ndarray):
                    array[...] = arrays.move(loaded[name], "cpu")
                    continue
                with array.device:  # which need not be the current one, nor that of the value
                    array[...] = arrays.move(loaded[name], "cuda").copy()

    @staticmethod
    def _checked(name: str, array: np.ndarray, value: Any) -> Any:
        """A value that can be loaded into one of the layer's arrays."""
        label = f"state[{name!r}]"
        if name == "num_batches_tracked":
            return np.array(_number_of_batches(label, value), np.int64)
        (value,), _ = arrays.adopt((label,), value)
        if value is None or value.shape != array.shape:
            got = "None" if value is None else value.shape
            raise ValueError(f"{label}: expected shape {array.shape}, got {got}")
        if value.dtype.str == "|V2":  # how NumPy's files hold bfloat16
            value = value.view(checks.floating_dtype(label, "bfloat16"))
        checks.floating(label, value.dtype)
        return value.copy()  # it may be another of the layer's own arrays

    def _state(self) -> dict[str, Array]:
        """The layer's arrays, seen through NumPy or CuPy if somebody has put others in."""
        state = {name: getattr(self, name) for name in self._names}
        batches = state.get("num_batches_tracked")
        if isinstance(batches, int | np.integer):
            state["num_batches_tracked"] = np.array(batches, np.int64)
        return {name: arrays.view(name, a) for name, a in state.items() if a is not None}


class TrackingLayer(Layer):
    """A layer over channels that may have running statistics."""

    _names: tuple[str, ...] = (
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
    )  # fmt: skip

    #: The norm's forward and backward functions, and the former's name for "with x's own
    #: statistics".
    _functions: tuple[Callable[..., Any], Callable[..., Any]]
    _own: str

    def __init__(
        self,
        num_features: int,
        *,
        eps: float,
        momentum: float | None,
        exponential_average_factor: float | Literal["cumulative"] | None,
        correction: float,
        affine: bool,
        track_running_statistics: bool,
        channel_axis: int,
        dtype: Any,
    ) -> None:
        super().__init__()
        self.num_features = number_of("num_features", num_features)
        self.eps = checks.not_negative("eps", eps)
        self.correction = checks.not_negative("correction", correction)
        self.channel_axis = checks.integer("channel_axis", channel_axis)
        self._factor: float | Literal["cumulative"] = _factor(momentum, exponential_average_factor)

        dtype = checks.floating_dtype("dtype", dtype)
        if checks.flag("affine", affine):
            self._parameters["weight"] = np.ones(num_features, dtype)
            self._parameters["bias"] = np.zeros(num_features, dtype)
        self.running_mean: Array | None = None
        self.running_var: Array | None = None
        self.num_batches_tracked: Array | None = None
        if checks.flag("track_running_statistics", track_running_statistics):
            statistics_dtype = checks.statistics_dtype(dtype)
            self.running_mean = np.zeros(num_features, statistics_dtype)
            self.running_var = np.ones(num_features, statistics_dtype)
            self.num_batches_tracked = np.zeros((), np.int64)

    def __repr__(self) -> str:
        factor = self._factor if self._factor == "cumulative" else f"{self._factor:g}"
        return (
            f"{type(self).__name__}({self.num_features}, eps={self.eps:g}, "
            f"exponential_average_factor={factor}, "
            f"correction={self.correction:g}, affine={self.weight is not None}, "
            f"track_running_statistics={self.running_mean is not None}, "
            f"channel_axis={self.channel_axis}, dtype={self._dtype()}, "
            f"training={self.training}, frozen={self.frozen})"
        )

    @property
    def exponential_average_factor(self) -> float | Literal["cumulative"]:
        """Weight given to the new batch in the running statistics; can be set."""
        return self._factor

    @exponential_average_factor.setter
    def exponential_average_factor(self, value: float | Literal["cumulative"]) -> None:
        self._factor = _factor(None, value)

    @property
    def momentum(self) -> float | None:
        """Weight kept on the old running statistics; None if cumulative; can be set."""
        return None if self._factor == "cumulative" else 1.0 - self._factor

    @momentum.setter
    def momentum(self, value: float) -> None:
        self._factor = checks.averaging_factor(value, None)

    def forward(self, x: Array, *, update_statistics: bool = True) -> Array:
        """Normalize x and keep what ``backward`` needs.

        Parameters
        ----------
        x : array, shape (N, C, ...) with C at `channel_axis`
        update_statistics : bool
            False when a checkpoint recomputes a batch that was seen already:
            the same output, the running statistics left alone.

        Returns
        -------
        y : array
            Shape, dtype and memory order of x.

        Raises
        ------
        ValueError, TypeError
            As the norm's forward function; the layer is as it was then.
        """
        update_statistics = checks.flag("update_statistics", update_statistics)
        adapting = self.training and not self.frozen
        tracks = self.running_mean is not None
        updating = adapting and tracks and update_statistics
        factor, batches = self._factor, 0
        if updating:  # found to be a number before the running statistics move
            batches = _number_of_batches("num_batches_tracked", self.num_batches_tracked)
            if batches == _MOST_BATCHES:
                checks.number_of_values("num_batches_tracked + 1", batches + 1, 1)
        if factor == "cumulative":
            factor = 1.0 / (batches + 1) if updating else 0.0
        self._check_channels(x)
        reading = updating or not adapting
        forward, backward = self._functions
        y, saved = forward(
            x,
            self.weight,
            self.bias,
            self.running_mean if reading else None,
            self.running_var if reading else None,
            exponential_average_factor=factor,
            eps=self.eps,
            correction=self.correction,
            channel_axis=self.channel_axis,
            **{self._own: adapting or not tracks},
        )
        if updating and self._has_values(saved):
            self.num_batches_tracked = np.array(batches + 1, np.int64)
        self._keep(backward, x, saved)
        return y

    def _check_channels(self, x: Array) -> None:
        check_channels(x, self.num_features, self.channel_axis)

    def _has_values(self, saved: Any) -> bool:
        """Whether there was anything in a batch to take into the running statistics."""
        return 0 not in saved.shape

    def train(self) -> Self:
        """Use the batch's statistics and update the running ones, unless frozen."""
        return super().train()

    def eval(self) -> Self:
        """Use the running statistics and leave them alone."""
        return super().eval()


def _listed(names: Collection[Any]) -> str:
    """Some of the names, and how many more."""
    shown = [repr(name) for name in sorted(names, key=str)[:8]]
    more = len(names) - len(shown)
    return f"[{', '.join(shown)}]" + (f" and {more} more" if more else "")


def _number_of_batches(name: str, value: Any) -> int:
    """A number of batches: an integer, or an array of one."""
    if type(value) is np.ndarray and value.dtype is _INT64 and value.ndim == 0:
        number: int = value.item()
        if number >= 0:  # as a rule
            return number
    if not isinstance(value, (int, np.integer)):
        value = arrays.view(name, value)
        if value.shape != ():
            raise ValueError(f"{name}: expected shape (), got {value.shape}")
        if not np.issubdtype(value.dtype, np.integer):
            raise TypeError(f"{name}: expected an integer, got dtype {value.dtype}")
        value = value.item()
    return checks.number_of_values(name, value, 0)


def number_of(name: str, value: Any) -> int:
    """A number of channels."""
    number = checks.integer(name, value)
    if number < 0:
        raise ValueError(f"{name}: expected at least 0, got {value}")
    return number


def samples_first(channel_axis: int) -> None:
    """The channels' axis is not that of the samples."""
    if channel_axis == 0:
        raise ValueError("channel_axis: expected another than 0, that of the samples, got 0")


def check_channels(x: Array, number: int, channel_axis: int) -> None:
    """The layer's own channel count in the message, rather than a parameter's shape."""
    shape = getattr(x, "shape", None)
    if shape is None or not -len(shape) <= channel_axis < len(shape):
        return
    if shape[channel_axis] != number:
        raise ValueError(
            f"x: expected {number} channels at axis {channel_axis}, got shape {tuple(shape)}"
        )


def _factor(momentum: Any, exponential_average_factor: Any) -> float | Literal["cumulative"]:
    """Weight of the new batch, from either way to give it, for a layer."""
    if not isinstance(exponential_average_factor, str):
        return checks.averaging_factor(momentum, exponential_average_factor)
    if exponential_average_factor != "cumulative":
        raise ValueError(
            'exponential_average_factor: expected a number from 0 to 1 or "cumulative", '
            f"got {exponential_average_factor!r}"
        )
    checks.averaging_factor(momentum, 1.0)
    return "cumulative"


def normalized(normalized_shape: Any) -> tuple[int, ...]:
    """The lengths of the axes to normalize over, from an integer or several."""
    lengths = (
        normalized_shape if isinstance(normalized_shape, (tuple, list)) else [normalized_shape]
    )
    if isinstance(normalized_shape, (float, str)):
        raise TypeError(
            f"normalized_shape: expected an integer or a tuple of them, got {normalized_shape!r}"
        )
    shape = tuple(number_of("normalized_shape", length) for length in lengths)
    if not shape:
        raise ValueError("normalized_shape: expected at least one length, got none")
    return shape


def check_trailing_axes(x: Array, normalized_shape: tuple[int, ...]) -> None:
    """The layer's own shape in the message, rather than a parameter's."""
    shape = getattr(x, "shape", None)
    if shape is not None and tuple(shape[-len(normalized_shape) :]) != normalized_shape:
        raise ValueError(
            f"x: expected last axes of the normalized_shape {normalized_shape}, "
            f"got shape {tuple(shape)}"
        )
