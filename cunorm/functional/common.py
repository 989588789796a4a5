"""What the norms have in common: how their values lie on x, and their forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, checks, running
from ..arrays import Array
from ..cpu import memory as cpu_memory
from ..geometry import Geometry

__all__ = ["Layout"]

_ndarray, _empty_like = np.ndarray, np.empty_like  # found sooner


class Layout(NamedTuple):
    """How the statistics and the parameters of a norm lie on x.

    Attributes
    ----------
    statistics, parameters : tuple of int
        Axes of x along which the statistics, the parameters, differ.
    statistics_shape, parameters_shape : tuple of int
    meaning : str
        What these shapes mean, for messages.
    leading : int
        How many axes of x have to be the slowest in memory.
    geometry : callable
        The `Geometry`, from a shape in memory order and that order.
    plain : Geometry or None
        That of a C-contiguous x; None if x is empty.
    """

    statistics: tuple[int, ...]
    parameters: tuple[int, ...]
    statistics_shape: tuple[int, ...]
    parameters_shape: tuple[int, ...]
    meaning: str
    leading: int
    geometry: Callable[[tuple[int, ...], tuple[int, ...]], Geometry]
    plain: Geometry | None = None

    def of(self, shape: tuple[int, ...]) -> Layout:
        """The layout of an x of this shape, complete."""
        if prod(shape) == 0:
            return self
        return self._replace(plain=self.geometry(shape, arrays.axes(len(shape))))


def channels_of(x: Any, channel_axis: Any) -> tuple[int, int, int]:
    """(channel axis from the front, number of channels, elements a channel) of x."""
    checks.present("x", x)
    return checks.channels(x.shape, x.dtype, channel_axis)


def running_scale(
    own: bool,
    name: str,
    running_mean: bool,
    running_var: bool,
    count: int,
    correction: float,
    several: Callable[[int, tuple[int, ...]], None],
    shape: tuple[int, ...],
) -> float:
    """What the batch's biased variance counts in the running one, of `count` values.

    `own` says whether x's statistics are used, and `name` is the argument that says so; whether
    there are running statistics is checked if they are not, whether x, of this `shape`, has
    `several` values if they are.
    """
    if not own:
        for label, given in (("running_mean", running_mean), ("running_var", running_var)):
            if not given:
                raise ValueError(f"{label}: expected an array when {name} is False, got None")
        return 1.0
    if prod(shape) == 0:
        return 1.0
    several(count, shape)
    if not running_var:
        return 1.0
    checks.correctable(count, correction)
    return running.bessel(count, correction)


def in_memory_order(array: Any, axes: tuple[int, ...], order: tuple[int, ...]) -> Any:
    """Values along some axes of x, in one dimension, as x has them in memory."""
    if array is None or array.ndim == 1:
        return array
    if order is arrays.axes(len(order)):  # as a rule
        return array.reshape(-1)
    return array.transpose(_turned(axes, order)).reshape(-1)


def _in_order_of_axes(
    values: Any, shape: tuple[int, ...], axes: tuple[int, ...], order: tuple[int, ...]
) -> Any:
    """The inverse of `in_memory_order`: of this shape. Several rows of values stay several."""
    if values is None or len(shape) == 1:
        return values
    if order is arrays.axes(len(order)):  # as a rule
        return values.reshape(shape if values.ndim == 1 else (len(values), *shape))
    rows = values.shape[:-1]
    turned = _turned(axes, order)
    lying = values.reshape((*rows, *(shape[i] for i in turned)))
    places = sorted(range(len(turned)), key=turned.__getitem__)
    return lying.transpose(*range(len(rows)), *(len(rows) + place for place in places))


@lru_cache(maxsize=1024)
def _turned(axes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(axes)), key=lambda i: order.index(axes[i])))


def forward(
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    known_of: Callable[[Any], tuple[Layout, float]],
    *,
    centered: bool = True,
    **options: Any,
) -> tuple[Any, Sequence[Any], Layout, tuple[tuple[int, ...], Any]]:
    """Compute what a norm's forward function returns, if x's own statistics are all it has.

    Returns y, the statistics (mean, inv_std and residual or, if they are not `centered`, inv_std
    alone), the layout, and x's shape and bias' dtype. `known_of` x says its layout and eps,
    `options` are the verb's.
    """
    if not centered:
        options["centered"] = False
    backend = arrays.usual_backend(x)
    if backend is not None:
        layout, eps = known_of(x)
        if layout.plain is not None and checks.are_usual(
            x, layout.parameters_shape, weight, bias, None, None, out, written=False
        ):
            y = empty_like_usual(x) if out is None else out
            if len(layout.parameters_shape) != 1:
                weight, bias = flat(weight), flat(bias)
            rows = backend.transform.normalize(
                x, weight, bias, None, None, eps, 1.0, 0.0, layout.plain, y, **options
            )
            statistics = usual_rows(rows, layout.statistics_shape, centered)
            return y, statistics, layout, (x.shape, None if bias is None else bias.dtype)

    given = out
    (x, weight, bias, out), place = arrays.adopt(
        ("x", "weight", "bias", "out"), x, weight, bias, out
    )
    layout, eps = known_of(x)
    checks.parameter("weight", weight, layout.parameters_shape, layout.meaning, x.dtype)
    checks.parameter("bias", bias, layout.parameters_shape, layout.meaning, x.dtype)
    if out is not None:
        checks.output(out, x, ("x",), x=x, weight=weight, bias=bias)
    with place:
        y, rows = normalize(place, x, weight, bias, eps, layout, out, **options)
        kept = (0, 1, 2) if centered else (1,)
        statistics = tuple(rows[i, ...] for i in kept)  # arrays, even of shape ()
        y, *exported = place.export(y, *statistics, given=given)
        return y, exported, layout, (x.shape, None if bias is None else bias.dtype)


def empty_like_usual(x: Any) -> Any:
    """A new array like a C-contiguous one that has a usual backend, made quickly."""
    kind = type(x)
    if kind is _ndarray:
        return cpu_memory.empty_like(x) if x.nbytes >= cpu_memory.LARGE_BYTES else _empty_like(x)
    return kind(x.shape, x.dtype)


def flat(values: Any) -> Any:
    """Values in one dimension, if they are NumPy's; of CuPy's, kernels take the address alone."""
    return values.ravel() if type(values) is _ndarray else values


def usual_rows(rows: Any, shape: tuple[int, ...], centered: bool = True) -> tuple[Any, ...]:
    """Mean, inv_std and residual from a verb's rows, or inv_std alone, in this shape.

    A view of CuPy's takes longer to make than an array in the same memory.
    """
    kind = type(rows)
    if kind is _ndarray:
        if len(shape) != 1:
            rows = rows.reshape(len(rows), *shape)
        return (rows[0, ...], rows[1, ...], rows[2, ...]) if centered else (rows[1, ...],)
    dtype, place, step = rows.dtype, rows.data, rows.strides[0]
    inv_std = kind(shape, dtype, place + step)
    if not centered:
        return (inv_std,)
    return kind(shape, dtype, place), inv_std, kind(shape, dtype, place + 2 * step)


def normalize(
    place: arrays.Place,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    layout: Layout,
    out: Any,
    **options: Any,
) -> tuple[Any, Any]:
    """Normalize x with its own statistics.

    Returns y and the statistics in the layout's shape, as rows of one array: mean, inv_std,
    residual and, unless x is empty, var. `options` are the verb's.
    """
    (source,), target, order, geometry, finish = lay(place, x, (x,), out, layout)
    if geometry is None:
        number = prod(layout.statistics_shape)
        dtype = checks.statistics_dtype(x.dtype)
        rows = statistics_of_nothing(place.xp, None, None, number, eps, dtype)
    else:
        rows = place.backend.transform.normalize(
            source, in_memory_order(weight, layout.parameters, order),
            in_memory_order(bias, layout.parameters, order), None, None, eps, 1.0, 0.0,
            geometry, target, **options,
        )  # fmt: skip
    rows = _in_order_of_axes(rows, layout.statistics_shape, layout.statistics, order)
    return finish(), rows


def lay(
    place: arrays.Place, x: Any, inputs: tuple[Any, ...], out: Any, layout: Layout
) -> tuple[tuple[Any, ...], Any, tuple[int, ...], Geometry | None, Callable[[], Any]]:
    """(inputs, output, order of axes, geometry, finish) for kernels; see `arrays.Operands`.

    The geometry is None if x is empty. When the kernels are done, `finish` gives the output as the
    caller asked for it.
    """
    geometry, model = layout.plain, x if out is None else out
    if geometry is not None and arrays.all_plain(inputs, model):  # as a rule
        target = place.memory.empty_like(x) if out is None else out
        return inputs, target, arrays.axes(x.ndim), geometry, lambda: target
    operands = arrays.Operands(place, x, inputs, out, layout.leading)
    if geometry is not None:
        geometry = layout.geometry(operands.out.shape, operands.order)
    return operands.inputs, operands.out, operands.order, geometry, operands.finish


_NAMES = ("dy", "x", "weight", "out", "saved.mean", "saved.inv_std", "saved.residual")


def backward(
    dy: Any,
    x: Any,
    saved: Any,
    weight: Any,
    output_mask: Any,
    out: Any,
    layout_of: Callable[[Any], Layout],
    *,
    training: bool = True,
    centered: bool = True,
    bias_dtype: Any = None,
    **options: Any,
) -> tuple[Array | None, Array | None, Array | None]:
    """Compute what a norm's backward function returns; uncentred norms have no dbias.

    `layout_of` x says how the norm lies on it, `training` whether its statistics are x's own;
    `options` are the verb's.
    """
    names = ("dx", "dweight", "dbias") if centered else ("dx", "dweight")
    wanted = checks.mask(output_mask, *names)
    if not centered:
        wanted = (*wanted, False)
    backend = arrays.usual_backend(x)
    if backend is not None and x.shape == saved.shape:
        layout = layout_of(x)
        statistics = mean, residual, inv_std = saved.mean, saved.residual, saved.inv_std
        if (
            layout.plain is not None
            and inv_std is not None
            and (mean is not None if centered else mean is residual is None)
            and wanted[0]
            and (training or wanted[1] or wanted[2])
            and checks.are_usual_in_backward(dy, x, statistics, weight, bias_dtype, out, layout)
        ):
            dtype = inv_std.dtype
            dtypes = dtype if weight is None else weight.dtype, bias_dtype or dtype
            return usual_gradients(
                backend, dy, x, statistics, weight, training, layout, wanted, dtypes, out, options
            )

    given = out
    (dy, x, weight, out, mean, inv_std, residual), place = arrays.adopt(
        _NAMES, dy, x, weight, out, saved.mean, saved.inv_std, saved.residual
    )
    layout = _checked_layout(dy, x, saved, mean, inv_std, residual, weight, layout_of, centered)
    if bias_dtype is not None:
        bias_dtype = checks.floating_dtype("saved.bias_dtype", bias_dtype)
    if out is not None:
        checks.gradient_output(
            out, wanted[0], dy, x, weight=weight,
            **{"saved.mean": mean, "saved.inv_std": inv_std, "saved.residual": residual},
        )  # fmt: skip
    with place:
        weight_dtype = inv_std.dtype if weight is None else weight.dtype
        dx, dweight, dbias = gradients_of(
            place, dy, x, mean, residual, inv_std, weight, training, layout, wanted,
            (weight_dtype, bias_dtype or inv_std.dtype), out, **options,
        )  # fmt: skip
        dx, dweight, dbias = place.export(dx, dweight, dbias, given=given)
        return dx, dweight, dbias


def usual_gradients(
    backend: Any,
    dy: Any,
    x: Any,
    statistics: tuple[Any, ...],
    weight: Any,
    training: bool,
    layout: Layout,
    wanted: tuple[bool, ...],
    dtypes: tuple[Any, Any],
    out: Any,
    options: dict[str, Any],
) -> tuple[Array, Array | None, Array | None]:
    """What `gradients_of` computes, of arguments that need no more than that.

    The `statistics` are mean, residual and inv_std.
    """
    mean, residual, inv_std = statistics
    if len(layout.statistics_shape) != 1:
        mean, residual, inv_std = flat(mean), flat(residual), flat(inv_std)
    kind, shape = type(x), layout.parameters_shape
    dx = empty_like_usual(x) if out is None else out
    dweight = kind(shape, dtypes[0]) if wanted[1] else None
    dbias = kind(shape, dtypes[1]) if wanted[2] else None
    if len(shape) != 1:
        weight = flat(weight)
    backend.backward.backward(
        dy, x, mean, residual, inv_std, weight, training, layout.plain, dx, dweight, dbias,
        **options,
    )  # fmt: skip
    return dx, dweight, dbias


def _checked_layout(
    dy: Any,
    x: Any,
    saved: Any,
    mean: Any,
    inv_std: Any,
    residual: Any,
    weight: Any,
    layout_of: Callable[[Any], Layout],
    centered: bool = True,
) -> Layout:
    """Check that the arguments of a backward function belong together; the layout of x."""
    checks.present("x", x)
    if x.shape != saved.shape:
        raise ValueError(f"x: expected the shape of the forward call, {saved.shape}, got {x.shape}")
    layout = layout_of(x)
    shape, meaning = layout.statistics_shape, "that of the forward call"
    if centered:
        checks.statistic("saved.mean", mean, shape, meaning)
        if residual is not None:
            checks.statistic("saved.residual", residual, shape, meaning)
    else:
        for name, array in (("saved.mean", mean), ("saved.residual", residual)):
            if array is not None:
                got = checks.shown(array)
                raise TypeError(f"{name}: expected None, as the forward call returned, got {got}")
    checks.statistic("saved.inv_std", inv_std, shape, meaning)
    if inv_std.dtype != checks.statistics_dtype(x.dtype):
        raise TypeError(
            f"x: expected the dtype of the forward call, whose statistics are {inv_std.dtype}, "
            f"got {x.dtype}"
        )
    checks.same_as_input("dy", dy, x)
    checks.parameter("weight", weight, layout.parameters_shape, layout.meaning, x.dtype)
    return layout


def gradients_of(
    place: arrays.Place,
    dy: Any,
    x: Any,
    mean: Any,
    residual: Any,
    inv_std: Any,
    weight: Any,
    training: bool,
    layout: Layout,
    wanted: tuple[bool, ...],
    dtypes: tuple[Any, Any],
    out: Any,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Compute those `wanted` of dx, dweight and dbias, the latter two in these dtypes."""
    xp, verbs = place.xp, place.backend.backward
    want_dx, want_dweight, want_dbias = wanted
    shape, axes = layout.parameters_shape, layout.parameters
    number = prod(shape)
    dweight = xp.empty(number, dtypes[0]) if want_dweight else None
    dbias = xp.empty(number, dtypes[1]) if want_dbias else None
    dx, order = None, arrays.axes(x.ndim)
    if x.size == 0:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.fill(0)
        if want_dx:
            dx = arrays.Operands(place, x, (x,), out).finish()
    elif want_dx or want_dweight or want_dbias:
        uses_x = training or want_dweight or want_dbias
        if want_dx:
            inputs, target, order, geometry, finish = lay(
                place, x, (x, dy) if uses_x else (dy,), out, layout
            )
        else:
            order, inputs = arrays.dense((x, dy), layout.leading)
            target, geometry = None, layout.geometry(inputs[0].shape, order)
        source, gradient = inputs[0], inputs[-1]
        dtype = checks.statistics_dtype(x.dtype)
        weight = in_memory_order(weight, axes, order)
        along = layout.statistics
        mean = as_dtype(in_memory_order(mean, along, order), dtype)
        residual = as_dtype(in_memory_order(residual, along, order), dtype)
        inv_std = as_dtype(in_memory_order(inv_std, along, order), dtype)
        if uses_x:
            verbs.backward(
                gradient, source, mean, residual, inv_std, weight, training, geometry,
                target, dweight, dbias, **options,
            )  # fmt: skip
        else:
            place.backend.transform.transform(
                gradient, None, None, inv_std, weight, None, geometry, target
            )
        if want_dx:
            dx = finish()
    return (
        dx,
        _in_order_of_axes(dweight, shape, axes, order),
        _in_order_of_axes(dbias, shape, axes, order),
    )


def double_backward(
    gdx: Any,
    gdweight: Any,
    gdbias: Any,
    dy: Any,
    x: Any,
    saved: Any,
    weight: Any,
    layout_of: Callable[[Any], Layout],
    *,
    training: bool = True,
) -> tuple[Array, Array, Array]:
    """Compute what a norm's double_backward function returns; see `backward`."""
    names = ("gdx", "gdweight", "gdbias", *_NAMES[:3], *_NAMES[4:])
    (gdx, gdweight, gdbias, dy, x, weight, mean, inv_std, residual), place = arrays.adopt(
        names, gdx, gdweight, gdbias, dy, x, weight,
        saved.mean, saved.inv_std, saved.residual,
    )  # fmt: skip
    layout = _checked_layout(dy, x, saved, mean, inv_std, residual, weight, layout_of)
    for name, array in (("gdweight", gdweight), ("gdbias", gdbias)):
        if array is not None:
            checks.statistic(name, array, layout.parameters_shape, layout.meaning)
    if gdx is not None:
        checks.same_as_input("gdx", gdx, x)

    xp, axes, shape = place.xp, layout.parameters, layout.parameters_shape
    with place, np.errstate(all="ignore"):
        inputs = (x, dy) if gdx is None else (x, dy, gdx)
        first = arrays.Operands(place, x, inputs, None, layout.leading)
        second = arrays.Operands(place, x, (), None, layout.leading)
        order = first.order
        ddweight = xp.zeros(prod(shape), inv_std.dtype if weight is None else weight.dtype)
        if gdx is None and gdweight is None:  # dy adds to dbias, and to that alone
            first.out.fill(0)
            second.out.fill(0)
            if gdbias is not None:
                along = [x.shape[axis] if axis in axes else 1 for axis in range(x.ndim)]
                first.out[...] = gdbias.reshape(along).transpose(order)
        elif x.size > 0:
            dtype = inv_std.dtype

            def lying(values: Any, along: tuple[int, ...]) -> Any:
                return as_dtype(in_memory_order(values, along, order), dtype)

            source, gradient, *upstream = first.inputs
            place.backend.double_backward.double_backward(
                upstream[0] if upstream else None, lying(gdweight, axes), lying(gdbias, axes),
                gradient, source,
                *(lying(values, layout.statistics) for values in (mean, residual, inv_std)),
                lying(weight, axes), training, layout.geometry(source.shape, order),
                first.out, second.out, ddweight if upstream else None,
            )  # fmt: skip
        ddweight = _in_order_of_axes(ddweight, shape, axes, order)
        ddy, ddx, ddweight = place.export(first.finish(), second.finish(), ddweight)
    return ddy, ddx, ddweight


def statistics_of_nothing(
    xp: Any, running_mean: Any, running_var: Any, number: int, eps: float, dtype: np.dtype
) -> Any:
    """Rows mean, inv_std, residual where there are no elements; without statistics, of zeros."""
    statistics = xp.zeros((3, number), dtype)
    with np.errstate(all="ignore"):
        var = xp.zeros(number) if running_var is None else running_var.astype(np.float64)
        statistics[1] = 1.0 / xp.sqrt(var + eps)
        if running_mean is not None:
            statistics[0], residual = split_mean(running_mean, dtype, xp)
            if residual is not None:
                statistics[2] = residual
    return statistics


def split_mean(mean: Any, dtype: np.dtype, xp: Any) -> tuple[Any, Any]:
    """A mean in the accumulator type, and what rounding took from it, if it was wider."""
    rounded = as_dtype(mean, dtype)
    if mean.dtype != np.float64 or dtype == np.float64:
        return rounded, None
    with np.errstate(all="ignore"):
        rest = mean - rounded
        return rounded, xp.where(xp.isfinite(rest), rest, 0.0).astype(dtype)


def as_dtype(array: Any, dtype: np.dtype) -> Any:
    """The array in a dtype and contiguous; itself where it is so already."""
    if array is None:
        return None
    if array.dtype is dtype and arrays.is_plain(array):
        return array
    with np.errstate(all="ignore"):
        return array.astype(dtype, order="C")
