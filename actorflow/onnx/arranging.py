"""Operators of ONNX that move, cut and pick elements, and those over axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import actorflow.functional as af
from actorflow.onnx.program import Known, Operand, StepCall
from actorflow.tensor.tensor import Tensor, as_tensor

Array = np.ndarray[Any, Any]


def _numbers(array: Array) -> list[int]:
    return [int(n) for n in np.asarray(array).reshape(-1)]


def axis_of(axis: int, rank: int, step: StepCall) -> int:
    """Return an axis counted from the front. Raises OnnxError out of range."""
    if not -rank <= axis < max(rank, 1):
        step.refuse(f"has axis {axis} of {rank} axes")
    return axis % max(rank, 1)


# Shapes.


def _reshape(data: Tensor, shape: Known, *, allowzero: int = 0, step: StepCall) -> Tensor:
    wanted = _numbers(shape)
    if not allowzero:
        if any(n == 0 and i >= data.ndim for i, n in enumerate(wanted)):
            step.refuse(f"copies extents of {data.type} that it does not have: {wanted}")
        wanted = [data.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    if allowzero and 0 in wanted and -1 in wanted:
        step.refuse(f"has allowzero, and both 0 and -1 in {wanted}")
    return data.reshape(*wanted) if wanted else data.reshape(())


def _flatten(input: Tensor, *, axis: int = 1, step: StepCall) -> Tensor:  # noqa: A002
    if not -input.ndim <= axis <= input.ndim:
        step.refuse(f"has axis {axis} of {input.ndim} axes")
    at = axis + input.ndim if axis < 0 else axis
    return input.reshape(math.prod(input.shape[:at]), math.prod(input.shape[at:]))


def _transpose(data: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return data.permute(*(range(data.ndim)[::-1] if perm is None else perm)) if data.ndim else data


def _concat(*inputs: Tensor, axis: int) -> Tensor:
    return af.concat(list(inputs), axis)


def _split(
    input: Tensor,  # noqa: A002
    split: Known | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
    step: StepCall,
) -> tuple[Tensor, ...]:
    at = axis_of(axis, input.ndim, step)
    extent, count = input.shape[at], num_outputs or len(step.step.outputs)
    if split is not None:
        sizes = _numbers(split)
    elif num_outputs is None and extent % count:
        step.refuse(f"parts {extent} elements evenly into {count}")
    else:
        each = -(-extent // count)
        sizes = [each] * (count - 1) + [extent - each * (count - 1)]
    if sum(sizes) != extent or min(sizes, default=0) < 0:
        step.refuse(f"parts an axis of {extent} elements into {sizes}")
    starts = np.cumsum([0, *sizes]).tolist()
    return tuple([af.narrow(input, at, a, n) for a, n in zip(starts, sizes, strict=False)])


def _squeeze(data: Tensor, axes: Known | None = None, *, step: StepCall) -> Tensor:
    if axes is None:
        gone = [i for i, n in enumerate(data.shape) if n == 1]
    else:
        gone = [axis_of(a, data.ndim, step) for a in _numbers(axes)]
    if any(data.shape[a] != 1 for a in gone):
        step.refuse(f"removes the axes {gone} of {data.type}, which are not all of extent 1")
    return data.reshape([n for i, n in enumerate(data.shape) if i not in gone])


def _unsqueeze(data: Tensor, axes: Known, *, step: StepCall) -> Tensor:
    given = _numbers(axes)
    rank = data.ndim + len(given)
    places = [axis_of(a, rank, step) for a in given]
    if len(set(places)) < len(places):
        step.refuse(f"adds the axes {given}, one of them twice")
    old = iter(data.shape)
    return data.reshape([1 if i in places else next(old) for i in range(rank)])


def _expand(input: Tensor, shape: Known, *, step: StepCall) -> Tensor:  # noqa: A002
    try:
        wide = np.broadcast_shapes(input.shape, tuple(_numbers(shape)))
    except ValueError as error:
        step.refuse(str(error))
    return input.broadcast_to(*wide) if wide else input


def _tile(input: Tensor, repeats: Known) -> Tensor:  # noqa: A002
    return af.tile(input, *_numbers(repeats)) if input.ndim else input


def _slice(
    data: Tensor,
    starts: Known,
    ends: Known,
    axes: Known | None = None,
    steps: Known | None = None,
    *,
    step: StepCall,
) -> Tensor:
    first = _numbers(starts)
    chosen = range(len(first)) if axes is None else _numbers(axes)
    paces = [1] * len(first) if steps is None else _numbers(steps)
    for start, end, axis, pace in zip(first, _numbers(ends), chosen, paces, strict=True):
        at = axis_of(axis, data.ndim, step)
        if not pace:
            step.refuse("has a step of 0")
        extent = data.shape[at]
        # Python's own slices clamp as ONNX does, but an end below -extent is "before the first".
        places = range(extent)[_bound(start, extent) : _bound(end, extent) : pace]
        if pace == 1:
            data = af.narrow(data, at, places.start if len(places) else 0, len(places))
        else:
            numbers = step.arange(len(places)) * pace + (places.start if len(places) else 0)
            data = af.index_select(data, at, numbers)
    return data


def _bound(place: int, extent: int) -> int | None:
    # With a negative step the end -extent - 1 and below means that the first element is in.
    return place if place >= -extent else -extent - 1


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad(
    data: Tensor,
    pads: Known,
    constant_value: Tensor | None = None,
    axes: Known | None = None,
    *,
    mode: str = "constant",
    value: float = 0.0,
    step: StepCall,
) -> Tensor:
    if mode not in _PAD_MODES:
        step.refuse(f"knows the modes {', '.join(_PAD_MODES)}, got {mode!r}")
    widths = _numbers(pads)
    chosen = range(data.ndim) if axes is None else _numbers(axes)
    each = {axis_of(a, data.ndim, step): i for i, a in enumerate(chosen)}
    if len(widths) != 2 * len(each):
        step.refuse(f"has {len(widths)} pads for {len(each)} axes")
    flat = [
        widths[each[a] + side * len(each)] if a in each else 0
        for a in reversed(range(data.ndim))
        for side in (0, 1)
    ]
    fill: Any = value
    if constant_value is not None:
        fill = constant_value.reshape(()).to(data.dtype)
    if mode == "constant":
        return padded(data, flat, fill)
    return af.pad(data, flat, _PAD_MODES[mode])


def padded(x: Tensor, flat: Sequence[int], fill: Any) -> Tensor:
    """Return x padded by a number or a scalar tensor, the last axis first as `af.pad`."""
    is_zero = isinstance(fill, (int, float)) and fill == 0
    return af.pad(x, flat) if is_zero else af.pad(x, flat, "constant", fill)


def _depth_to_space(input: Tensor, *, blocksize: int, mode: str = "DCR", step: StepCall) -> Tensor:  # noqa: A002
    n, c, h, w = input.shape
    b = blocksize
    if mode == "DCR":
        parts = input.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    elif mode == "CRD":
        parts = input.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    else:
        step.refuse(f"knows the modes DCR and CRD, got {mode!r}")
    return parts.reshape(n, c // (b * b), h * b, w * b)


def _space_to_depth(input: Tensor, *, blocksize: int, mode: str = "DCR", step: StepCall) -> Tensor:  # noqa: A002
    n, c, h, w = input.shape
    b = blocksize
    parts = input.reshape(n, c, h // b, b, w // b, b)
    if mode not in ("DCR", "CRD"):
        step.refuse(f"knows the modes DCR and CRD, got {mode!r}")
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return parts.permute(*order).reshape(n, c * b * b, h // b, w // b)


def _trilu(input: Tensor, k: Known | None = None, *, upper: int = 1) -> Tensor:  # noqa: A002
    at = 0 if k is None else int(k.reshape(()))
    return af.triu(input, at) if upper else af.tril(input, at)


# Indices.


def _gather(data: Operand, indices: Operand, *, axis: int = 0, step: StepCall) -> Tensor:
    at = axis_of(axis, len(data.shape), step)
    index = indices if isinstance(indices, np.ndarray) else indices.to("int64")
    if isinstance(index, np.ndarray) and not index.ndim:
        return af.select(data, at, int(index))
    return as_tensor(data)[(*[slice(None)] * at, index)]


def _from_front(indices: Operand, extent: int) -> Operand:
    if isinstance(indices, np.ndarray):
        return np.where(indices < 0, indices + extent, indices).astype(np.int64)
    wide = indices.to("int64")
    return af.where(wide < 0, wide + extent, wide)


def _gather_elements(data: Tensor, indices: Operand, *, axis: int = 0, step: StepCall) -> Tensor:
    at = axis_of(axis, data.ndim, step)
    return af.gather(data, at, _from_front(indices, data.shape[at]))


def _gather_nd(data: Tensor, indices: Operand, *, batch_dims: int = 0, step: StepCall) -> Tensor:
    at, depth = batch_dims, indices.shape[-1]
    if at + depth > data.ndim or data.shape[:at] != tuple(indices.shape[:at]):
        step.refuse(f"picks from {data.type} by indices {list(indices.shape)}")
    places = [as_tensor(indices)[..., i] for i in range(depth)]
    rank = len(indices.shape) - 1
    batch = [np.arange(n).reshape(n, *[1] * (rank - i - 1)) for i, n in enumerate(data.shape[:at])]
    return data[(*batch, *places)]


_REDUCTIONS = {"none": None, "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _reduction(reduction: str, step: StepCall) -> str | None:
    if reduction not in _REDUCTIONS:
        step.refuse(f"knows the reductions {', '.join(_REDUCTIONS)}, got {reduction!r}")
    return _REDUCTIONS[reduction]


def _scatter_elements(
    data: Tensor,
    indices: Operand,
    updates: Tensor,
    *,
    axis: int = 0,
    reduction: str = "none",
    step: StepCall,
) -> Tensor:
    at = axis_of(axis, data.ndim, step)
    index, kind = _from_front(indices, data.shape[at]), _reduction(reduction, step)
    if kind is None:
        return af.scatter(data, at, index, updates)
    return af.scatter_reduce(data, at, index, updates, kind)


def _scatter_nd(
    data: Tensor, indices: Operand, updates: Tensor, *, reduction: str = "none", step: StepCall
) -> Tensor:
    kind, depth = _reduction(reduction, step), indices.shape[-1]
    rows = math.prod(data.shape[:depth])
    wide = as_tensor(indices)
    flat: Any = 0
    for i in range(depth):
        flat = flat * data.shape[i] + _from_front(wide[..., i], data.shape[i])
    table = data.reshape(rows, -1) if data.shape else data.reshape(1, 1)
    width = table.shape[1]
    new = updates.reshape(-1, width)
    if kind is None:
        return af.index_copy(table, 0, flat.reshape(-1), new).reshape(data.shape)
    index = flat.reshape(-1, 1).broadcast_to(new.shape[0], width)
    return af.scatter_reduce(table, 0, index, new, kind).reshape(data.shape)


def _one_hot(
    indices: Operand, depth: Known, values: Tensor, *, axis: int = -1, step: StepCall
) -> Tensor:
    extent = int(depth.reshape(-1)[0])
    at = axis_of(axis, len(indices.shape) + 1, step)
    ids = as_tensor(indices).to("int64")
    ids = af.where(ids < 0, ids + extent, ids)
    # Compared, not scattered: an id outside gives a row that is off.
    along = step.arange(extent).reshape(extent, *[1] * (len(indices.shape) - at))
    return af.where(af.unsqueeze(ids, at) == along, values[1], values[0])


def _top_k(
    X: Tensor,  # noqa: N803
    K: Known,  # noqa: N803
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,  # noqa: A002  # sorted is one of the orders that are allowed
    step: StepCall,
) -> tuple[Tensor, Tensor]:
    count = int(np.asarray(K).reshape(-1)[0])
    values, places = af.topk(X, count, axis_of(axis, X.ndim, step), largest=bool(largest))
    return values, places


# Over axes.


def _reducing(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    """Return an operator that reduces the axes of an input or attribute; all of them by default."""

    def operator(
        data: Tensor,
        axes: Known | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
        step: StepCall,
    ) -> Tensor:
        chosen = [] if axes is None else [axis_of(a, data.ndim, step) for a in _numbers(axes)]
        if not chosen and noop_with_empty_axes:
            return function(af.unsqueeze(data, -1), [data.ndim], False)  # each element by itself
        return function(data, chosen or [*range(data.ndim)], bool(keepdims))

    return operator


def _at_rank_0(function: Callable[..., Tensor]) -> Callable[[Tensor, list[int], bool], Tensor]:
    def over(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if axes:
            return function(x, axes, keep)
        return function(x.reshape(1), [0], False)

    return over


def _kept(x: Tensor, axes: list[int], keep: bool) -> list[int]:
    return [1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes]


def _extreme(function: Callable[..., Tensor], sign: int) -> Callable[..., Tensor]:
    """Return a reduction to the largest or smallest; of nothing it is the last of the other end."""

    def over(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if any(x.shape[a] == 0 for a in axes):
            dtype, fill = x.dtype.value, np.asarray(sign * np.inf)
            if not x.dtype.is_float:
                ends = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
                fill = np.asarray(ends[sign > 0])
            return as_tensor(fill.astype(dtype)).broadcast_to(*_kept(x, axes, keep))
        return function(x, axes, keepdim=keep)

    return over


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Return a result in the dtype of the operand, where sums of integers are wider."""
    return y if y.dtype is x.dtype else y.to(x.dtype)


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return _same(x, af.sum(x, axes, keepdim=keep))


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.dtype.is_float:
        return af.mean(x, axes, keepdim=keep)
    count = math.prod([x.shape[a] for a in axes])
    return _same(x, af.trunc(af.sum(x, axes, keepdim=keep).to("float64") / max(count, 1)))


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return _same(x, af.prod(x, axes, keepdim=keep))


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if any(x.shape[a] == 0 for a in axes):
        return as_tensor(np.asarray(-np.inf, x.dtype.value)).broadcast_to(*_kept(x, axes, keep))
    return af.logsumexp(x, axes, keepdim=keep)


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(
        data: Tensor,
        *,
        axis: int = 0,
        keepdims: int = 1,
        select_last_index: int = 0,
        step: StepCall,
    ) -> Tensor:
        at = axis_of(axis, data.ndim, step)
        if not select_last_index:
            return function(data, at, keepdim=bool(keepdims))
        return data.shape[at] - 1 - function(af.flip(data, at), at, keepdim=bool(keepdims))

    return operator


def _cum_sum(
    x: Tensor, axis: Known, *, exclusive: int = 0, reverse: int = 0, step: StepCall
) -> Tensor:
    at = axis_of(int(axis.reshape(-1)[0]), x.ndim, step)
    given = af.flip(x, at) if reverse else x
    total = _same(x, af.cumsum(given, at))
    if exclusive:  # the sums of what comes before: moved by one, as a difference would cancel
        extent = x.shape[at]
        widths = [0] * (2 * (x.ndim - 1 - at)) + [1, 0]
        total = af.pad(af.narrow(total, at, 0, max(extent - 1, 0)), widths) if extent else total
    return af.flip(total, at) if reverse else total


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(input: Tensor, *, axis: int | None = None, step: StepCall) -> Tensor:  # noqa: A002
        if step.opset >= 13:
            return function(input, axis_of(-1 if axis is None else axis, input.ndim, step))
        at = 1 if axis is None else axis
        at = at + input.ndim if at < 0 else at
        rows = input.reshape(math.prod(input.shape[:at]), math.prod(input.shape[at:]))
        return function(rows, 1).reshape(input.shape)

    return operator


def _hardmax(x: Tensor, axis: int) -> Tensor:
    first = af.argmax(x, axis, keepdim=True)
    along = np.arange(x.shape[axis]).reshape(-1, *[1] * (x.ndim - 1 - axis))
    return (first == along).to(x.dtype)


ARRANGING: dict[str, Callable[..., Any]] = {
    "ArgMax": _arg(af.argmax),
    "ArgMin": _arg(af.argmin),
    "Concat": _concat,
    "CumSum": _cum_sum,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Hardmax": _softmax(_hardmax),
    "LogSoftmax": _softmax(af.log_softmax),
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Softmax": _softmax(af.softmax),
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    **{
        name: _reducing(_at_rank_0(function))
        for name, function in {
            "ReduceL1": lambda x, axes, keep: _sum(af.abs(x), axes, keep),
            "ReduceL2": lambda x, axes, keep: af.sqrt(af.sum(af.square(x), axes, keepdim=keep)),
            "ReduceLogSum": lambda x, axes, keep: af.log(af.sum(x, axes, keepdim=keep)),
            "ReduceLogSumExp": _log_sum_exp,
            "ReduceMax": _extreme(af.amax, -1),
            "ReduceMean": _mean,
            "ReduceMin": _extreme(af.amin, 1),
            "ReduceProd": _prod,
            "ReduceSum": _sum,
            "ReduceSumSquare": lambda x, axes, keep: _sum(af.square(x), axes, keep),
        }.items()
    },
}
