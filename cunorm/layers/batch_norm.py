"""Batch normalization as a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np

from .. import arrays, checks
from ..arrays import Array
from ..functional.batch_norm import BatchNormSaved, batch_norm_backward, batch_norm_forward

__all__ = ["BatchNorm"]


class BatchNorm:
    """Batch normalization with its parameters and running statistics.

    ``forward`` computes `cunorm.batch_norm_forward` and keeps what ``backward``
    needs: a reference to x (do not change x before ``backward``) and the saved
    mean and inverse standard deviation.

    Parameters
    ----------
    num_features : int
        Number of channels C.
    eps : float
        Added to the variance.
    momentum : float, optional
        Weight **kept on the old** running value (Keras, Chainer's decay).
    exponential_average_factor : float or "cumulative", optional
        Weight **given to the new** batch (cuDNN; PyTorch's momentum).
        "cumulative" averages all batches equally. Give one of the two or
        neither, which means a factor of 0.1.
    correction : float
        1: unbiased running variance (PyTorch); 0: biased (Keras, Flax).
    affine : bool
        Whether there are `weight` and `bias`.
    track_running_statistics : bool
        Without running statistics the batch's own are used in inference too.
    channel_axis : int
        -1 for channels last.
    dtype : dtype or "bfloat16"
        Of `weight` and `bias`; float32 by default, which goes with data of any
        dtype. For all digits of float64 data take float64. Running statistics
        are float32, for float64 float64.

    Attributes
    ----------
    weight, bias : array, shape (C,), or None
        Initially 1 and 0.
    running_mean, running_var : array, shape (C,), or None
        Initially 0 and 1.
    num_batches_tracked : array of int64, shape ()
        Batches taken into the running statistics.
    training, frozen : bool
        Set by `train`, `eval`, `freeze` and `unfreeze`.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.batch_norm_forward`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = None,
        exponential_average_factor: float | Literal["cumulative"] | None = None,
        correction: float = 1,
        affine: bool = True,
        track_running_statistics: bool = True,
        channel_axis: int = 1,
        dtype: Any = np.float32,
    ) -> None:
        self.num_features = checks.integer("num_features", num_features)
        if self.num_features < 0:
            raise ValueError(f"num_features: expected at least 0, got {num_features}")
        self.eps = checks.not_negative("eps", eps)
        self.correction = checks.not_negative("correction", correction)
        self.channel_axis = checks.integer("channel_axis", channel_axis)
        self.training = True
        self.frozen = False
        self._factor: float | Literal["cumulative"] = _factor(momentum, exponential_average_factor)
        self._cache: tuple[Array, BatchNormSaved] | None = None
        self._parameters: dict[str, Array] = {}
        self._gradients: dict[str, Array] = {}

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
        dtype = self.weight.dtype if self.weight is not None else None
        factor = self._factor if self._factor == "cumulative" else f"{self._factor:g}"
        return (
            f"BatchNorm({self.num_features}, eps={self.eps:g}, "
            f"exponential_average_factor={factor}, "
            f"correction={self.correction:g}, affine={self.weight is not None}, "
            f"track_running_statistics={self.running_mean is not None}, "
            f"channel_axis={self.channel_axis}, dtype={dtype}, "
            f"training={self.training}, frozen={self.frozen})"
        )

    @property
    def weight(self) -> Array | None:
        """Scale of every channel."""
        return self._parameters.get("weight")

    @weight.setter
    def weight(self, value: Array) -> None:
        self._parameters["weight"] = value

    @property
    def bias(self) -> Array | None:
        """Shift of every channel."""
        return self._parameters.get("bias")

    @bias.setter
    def bias(self, value: Array) -> None:
        self._parameters["bias"] = value

    @property
    def parameters(self) -> dict[str, Array]:
        """The arrays to train, by the names ``weight`` and ``bias``; none when frozen.

        The dict is the layer's own: change the arrays in place, or put others in it.
        """
        return {} if self.frozen else self._parameters

    @property
    def gradients(self) -> dict[str, Array]:
        """What the last ``backward`` found for `parameters`, by the same names."""
        return self._gradients

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
            As `cunorm.batch_norm_forward`; the layer is as it was then.
        """
        update_statistics = checks.flag("update_statistics", update_statistics)
        adapting = self.training and not self.frozen
        tracks = self.running_mean is not None
        updating = adapting and tracks and update_statistics
        factor = self._factor
        if factor == "cumulative":
            factor = 1.0 / (int(self.num_batches_tracked) + 1) if updating else 0.0  # type: ignore[arg-type]
        self._check_channels(x)
        y, saved = batch_norm_forward(
            x,
            self.weight,
            self.bias,
            self.running_mean if updating or not adapting else None,
            self.running_var if updating or not adapting else None,
            training=adapting or not tracks,
            exponential_average_factor=factor,
            eps=self.eps,
            correction=self.correction,
            channel_axis=self.channel_axis,
        )
        if updating and 0 not in saved.shape:
            self.num_batches_tracked += 1  # type: ignore[operator]
        self._cache = x, saved
        return y

    __call__ = forward

    def backward(self, dy: Array) -> Array:
        """Gradient with respect to x of the last ``forward``; sets `gradients`.

        Afterwards the layer lets go of x and of the saved statistics.

        Parameters
        ----------
        dy : array
            Gradient with respect to y: shape and dtype of x.

        Returns
        -------
        dx : array
            Shape, dtype and memory order of x.

        Raises
        ------
        RuntimeError
            Without a ``forward`` before, or for the second time after one.
        ValueError, TypeError
            As `cunorm.batch_norm_backward`; the layer is as it was then.
        """
        if self._cache is None:
            raise RuntimeError("backward: expected a call of forward before each call, got none")
        x, saved = self._cache
        trains = bool(self.parameters)
        dx, dweight, dbias = batch_norm_backward(
            dy, x, saved, self.weight, output_mask=(True, trains, trains)
        )
        self._gradients = {"weight": dweight, "bias": dbias} if trains else {}
        self._cache = None
        return dx

    def train(self) -> Self:
        """Use the batch's statistics and update the running ones, unless frozen."""
        self.training = True
        return self

    def eval(self) -> Self:
        """Use the running statistics and leave them alone."""
        self.training = False
        return self

    def freeze(self) -> Self:
        """Make the layer a constant: running statistics, weight and bias stay as they are.

        It normalizes with the running statistics and has no `parameters` to
        train, whatever `train` says, until `unfreeze`.

        Raises
        ------
        ValueError
            Without running statistics.
        """
        if self.running_mean is None:
            raise ValueError("freeze: expected a layer with running statistics, got one without")
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
        for name, array in self._parameters.items():
            self._parameters[name] = arrays.move(array, device)
        if self.running_mean is not None:
            self.running_mean = arrays.move(self.running_mean, device)
            self.running_var = arrays.move(self.running_var, device)
        self._gradients = {}
        self._cache = None
        return self

    def state_dict(self) -> dict[str, Array]:
        """Copies of parameters and running statistics, under PyTorch's names.

        ``weight, bias, running_mean, running_var, num_batches_tracked``, as far
        as the layer has them, as NumPy arrays wherever the layer is; ready for
        ``numpy.savez``.
        """
        return {name: arrays.move(a.copy(), "cpu") for name, a in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take parameters and running statistics from arrays under PyTorch's names.

        Values are copied and cast to the layer's dtypes. Arrays of a PyTorch
        state dict, of ``numpy.load`` and of `state_dict` will do; a missing
        ``num_batches_tracked`` counts as 0. In a whole network's state dict the
        names have the module's before them ("bn1.weight"): take that off first.

        Raises
        ------
        ValueError
            For missing or unknown names and wrong shapes; nothing has been loaded then.
        TypeError
            For what is no mapping to numeric arrays; nothing has been loaded then.
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
            missing = sorted(own.keys() - given.keys())
            unknown = sorted(given.keys() - own.keys())
            raise ValueError(
                f"state: expected the names {sorted(own)}; missing {missing}, unknown {unknown}"
            )
        loaded = {name: self._checked(name, array, given[name]) for name, array in own.items()}
        for name, array in own.items():
            device = "cpu" if isinstance(array, np.ndarray) else "cuda"
            with np.errstate(all="ignore"):
                array[...] = arrays.move(loaded[name], device)

    @staticmethod
    def _checked(name: str, array: np.ndarray, value: Any) -> Any:
        """A value that can be loaded into one of the layer's arrays."""
        label = f"state[{name!r}]"
        if name == "num_batches_tracked" and isinstance(value, (int, np.integer)):
            value = np.asarray(value)
        (value,), _ = arrays.adopt((label,), value)
        if value is None or value.shape != array.shape:
            got = "None" if value is None else value.shape
            raise ValueError(f"{label}: expected shape {array.shape}, got {got}")
        if name == "num_batches_tracked":
            if not np.issubdtype(value.dtype, np.integer):
                raise TypeError(f"{label}: expected integers, got dtype {value.dtype}")
            return np.asarray(checks.number_of_values(label, value.item(), 0))
        if array.dtype.name == "bfloat16" and value.dtype.str == "|V2":  # how NumPy's files hold it
            value = value.view(array.dtype)
        checks.floating(label, value.dtype)
        return value.copy()  # it may be another of the layer's own arrays

    def _state(self) -> dict[str, Array]:
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        state = {name: getattr(self, name) for name in names}
        return {name: array for name, array in state.items() if array is not None}

    def _check_channels(self, x: Array) -> None:
        """The layer's own channel count in the message, rather than a parameter's shape."""
        shape = getattr(x, "shape", None)
        if shape is None or not -len(shape) <= self.channel_axis < len(shape):
            return
        if shape[self.channel_axis] != self.num_features:
            raise ValueError(
                f"x: expected {self.num_features} channels at axis {self.channel_axis}, "
                f"got shape {tuple(shape)}"
            )


def _factor(momentum: Any, exponential_average_factor: Any) -> float | Literal["cumulative"]:
    """Weight of the new batch, from either way to give it, for a layer."""
    if not isinstance(exponential_average_factor, str):
        return checks.averaging_factor(momentum, exponential_average_factor, stacklevel=4)
    if exponential_average_factor != "cumulative":
        raise ValueError(
            'exponential_average_factor: expected a number from 0 to 1 or "cumulative", '
            f"got {exponential_average_factor!r}"
        )
    checks.averaging_factor(momentum, 1.0)
    return "cumulative"
