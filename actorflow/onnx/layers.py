"""Operators of ONNX that are layers: products, convolutions, pools, norms, losses, resizing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import actorflow.functional as af
from actorflow.functional.convolution import convolved, transposed
from actorflow.functional.pooling import max_pool
from actorflow.onnx.arranging import axis_of, padded
from actorflow.onnx.program import Known, StepCall, taking
from actorflow.tensor.tensor import Tensor, as_tensor

# ONNX's names of operands are capital letters; so are these.
# ruff: noqa: N803, N806


def _gemm(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    y = (A.T if transA else A) @ (B.T if transB else B)
    y = y if alpha == 1.0 else y * alpha
    if C is None:
        return y
    return y + (C if beta == 1.0 else C * beta)


def _matmul(A: Tensor, B: Tensor) -> Tensor:
    return af.matmul(A, B)


def _einsum(*Inputs: Tensor, equation: str) -> Tensor:
    return af.einsum(equation, *Inputs)


# Windows.

Array = np.ndarray[Any, Any]
Extents = tuple[int, ...]


@dataclass(frozen=True)
class _WindowSpans:
    """The windows of a convolution or pool: what each axis has before and behind, and how many."""

    kernel: Extents
    strides: Extents
    apart: Extents
    low: Extents
    high: Extents
    """Elements behind that windows reach over; below 0 where they do not reach the end."""
    real_high: Extents
    """The pads behind that the model states."""

    @property
    def widths(self) -> list[int]:
        """The padding of `af.pad`, the last axis first."""
        pairs = zip(reversed(self.low), reversed(self.high), strict=True)
        return [width for pair in pairs for width in pair]


def _per_axis(
    given: Sequence[int] | None, rank: int, default: int, what: str, step: StepCall
) -> Extents:
    numbers = (default,) * rank if given is None else tuple(int(n) for n in given)
    if len(numbers) != rank or (what != "pads" and min(numbers, default=1) < 1):
        step.refuse(f"has {what} {list(numbers)} for {rank} spatial axes")
    return numbers


def _sizes(kernel: Sequence[int], step: StepCall) -> tuple[Extents, Extents, Extents]:
    """Return kernel, strides and dilations of a step."""
    given, rank = step.step.attributes, len(kernel)
    stated = given.get("kernel_shape")
    if stated is not None and tuple(stated) != tuple(kernel):
        step.refuse(f"has kernel_shape {list(stated)} and a weight with windows {list(kernel)}")
    return (
        _per_axis(kernel, rank, 1, "kernel_shape", step),
        _per_axis(given.get("strides"), rank, 1, "strides", step),
        _per_axis(given.get("dilations"), rank, 1, "dilations", step),
    )


def _padding(rank: int, step: StepCall) -> tuple[Extents, Extents] | str:
    """Return the pads before and behind, or SAME_UPPER or SAME_LOWER."""
    auto = step.step.attributes.get("auto_pad", "NOTSET")
    pads = step.step.attributes.get("pads")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return str(auto)
    if auto not in ("NOTSET", "VALID"):
        step.refuse(f"has auto_pad {auto!r}; known are NOTSET, VALID, SAME_UPPER and SAME_LOWER")
    if auto == "VALID" or pads is None:
        return (0,) * rank, (0,) * rank
    if len(pads) != 2 * rank or min(pads, default=0) < 0:
        step.refuse(f"has pads {list(pads)} for {rank} spatial axes")
    return tuple(pads[:rank]), tuple(pads[rank:])


def _windows(
    spatial: Extents, kernel: Sequence[int], step: StepCall, ceil: int = 0
) -> _WindowSpans:
    """Return the windows over spatial extents."""
    kernel, strides, apart = _sizes(kernel, step)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, apart, strict=True)]
    padding = _padding(len(spatial), step)
    low, high, reach = [], [], []
    for axis, (n, stride, span) in enumerate(zip(spatial, strides, spans, strict=True)):
        if isinstance(padding, str):
            count = -(-n // stride)
            total = max((count - 1) * stride + span - n, 0)
            before = total // 2 if padding == "SAME_UPPER" else total - total // 2
            behind = total - before
        else:
            before, behind = padding[0][axis], padding[1][axis]
            free = n + before + behind - span
            count = (-(-free // stride) if ceil else free // stride) + 1
            # A last window that would begin behind the elements is none.
            count -= bool(ceil and (count - 1) * stride >= n + before)
        if count < 1:
            step.refuse(f"has no window of {span} elements on {n} with pads {before} and {behind}")
        low.append(before)
        high.append((count - 1) * stride + span - n - before)
        reach.append(behind)
    return _WindowSpans(kernel, strides, apart, tuple(low), tuple(high), tuple(reach))


_WINDOW_ATTRIBUTES = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")
"""What `_windows` reads of a step itself."""


@taking(*_WINDOW_ATTRIBUTES)
def _conv(
    X: Tensor, W: Tensor, B: Tensor | None = None, *, group: int = 1, step: StepCall, **windows: Any
) -> Tensor:
    rank = X.ndim - 2
    if rank not in (1, 2, 3):
        step.refuse(f"convolves over 1 to 3 axes, got {X.type}")
    at = _windows(X.shape[2:], W.shape[2:], step)
    if at.low == at.real_high and min(at.low) >= 0:
        padding: Any = at.low
    else:
        X, padding = af.pad(X, at.widths), 0
    return convolved(rank, X, W, B, at.strides, padding, at.apart, group)


@taking(*_WINDOW_ATTRIBUTES)
def _conv_transpose(
    X: Tensor,
    W: Tensor,
    B: Tensor | None = None,
    *,
    output_padding: Any = None,
    output_shape: Any = None,
    group: int = 1,
    step: StepCall,
    **windows: Any,
) -> Tensor:
    rank = X.ndim - 2
    if rank not in (1, 2, 3):
        step.refuse(f"convolves over 1 to 3 axes, got {X.type}")
    kernel, strides, apart = _sizes(W.shape[2:], step)
    more = [0] * rank if output_padding is None else list(output_padding)
    padding = _padding(rank, step)
    wanted = None if output_shape is None else list(output_shape)[-rank:]
    if wanted is None and isinstance(padding, str):
        wanted = [n * s for n, s in zip(X.shape[2:], strides, strict=True)]
    cuts = []
    for axis, (n, s) in enumerate(zip(X.shape[2:], strides, strict=True)):
        whole = (n - 1) * s + (kernel[axis] - 1) * apart[axis] + 1
        if wanted is not None:
            total = whole + more[axis] - wanted[axis]
            if total < 0 and output_shape is None:
                step.refuse(f"has {padding} and windows that leave gaps, of which runtimes differ")
            low = total // 2 if padding == "SAME_UPPER" else total - total // 2
            high = total - low
        else:
            low, high = padding[0][axis], padding[1][axis]
        cuts.append((-int(low), more[axis] - int(high)))
    full = transposed(rank, X, W, None, strides, 0, 0, group, apart)
    y = af.pad(full, [width for pair in reversed(cuts) for width in pair])
    return y if B is None else y + B.reshape(-1, *[1] * rank)


@taking(*_WINDOW_ATTRIBUTES)
def _max_pool(
    X: Tensor,
    *,
    kernel_shape: Any,
    ceil_mode: int = 0,
    storage_order: int = 0,
    step: StepCall,
    **windows: Any,
) -> Any:
    rank = X.ndim - 2
    if rank not in (1, 2, 3):
        step.refuse(f"pools over 1 to 3 axes, got {X.type}")
    at = _windows(X.shape[2:], kernel_shape, step, ceil_mode)
    # A number of 32 or 64 bits would lose some in float32.
    if not X.dtype.is_float and X.dtype.itemsize > 1:
        step.refuse(f"pools floats and integers of 8 bits, got {X.type}")
    x = X if X.dtype.is_float else X.to("float32")
    if any(at.widths):
        x = padded(x, at.widths, -math.inf)
    pooled: Any = max_pool(rank, x, at.kernel, at.strides, 0, at.apart, False, step.wants(1))
    if not step.wants(1):
        return pooled.to(X.dtype) if X.dtype is not x.dtype else pooled
    y, places = pooled
    spatial, wide = X.shape[2:], x.shape[2:]
    at_axis: list[Tensor] = []
    for extent, low in zip(reversed(wide), reversed(at.low), strict=True):
        at_axis.insert(0, places % extent - low)
        places = places // extent
    flat: Any = 0
    order = range(rank) if not storage_order else reversed(range(rank))
    for axis in order:
        flat = flat * spatial[axis] + at_axis[axis]
    planes = step.arange(math.prod(X.shape[:2])).reshape(*X.shape[:2], *[1] * rank)
    return y.to(X.dtype) if X.dtype is not x.dtype else y, flat + planes * math.prod(spatial)


def _sums(X: Tensor, at: _WindowSpans) -> Tensor:
    """Return the sums of windows: a convolution of each channel with ones."""
    channels = X.shape[1]
    ones = np.ones((channels, 1, *at.kernel), X.dtype.value)
    x = af.pad(X, at.widths) if any(at.widths) else X
    return convolved(X.ndim - 2, x, as_tensor(ones), None, at.strides, 0, at.apart, channels)


@taking(*_WINDOW_ATTRIBUTES)
def _average_pool(
    X: Tensor,
    *,
    kernel_shape: Any,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    step: StepCall,
    **windows: Any,
) -> Tensor:
    at = _windows(X.shape[2:], kernel_shape, step, ceil_mode)
    x = X.to("float32") if X.dtype.value == "float16" else X
    sums = _sums(x, at)
    counts: Any = None
    for axis, n in enumerate(X.shape[2:]):
        firsts = step.arange(sums.shape[axis + 2]) * at.strides[axis] - at.low[axis]
        taps = firsts[:, None] + np.arange(at.kernel[axis]) * at.apart[axis]
        begin, end = 0, n
        if count_include_pad:
            begin, end = -at.low[axis], n + at.real_high[axis]
        inside = np.maximum(((taps >= begin) & (taps < end)).sum(1), 1).astype(x.dtype.value)
        # An outer product of the counts along axes, which the plan computes.
        here = as_tensor(inside.reshape(-1, *[1] * (X.ndim - axis - 3)))
        counts = here if counts is None else counts * here
    y: Tensor = sums / counts
    return y if x is X else y.to(X.dtype)


@taking(*_WINDOW_ATTRIBUTES)
def _lp_pool(
    X: Tensor, *, kernel_shape: Any, ceil_mode: int = 0, p: int = 2, step: StepCall, **windows: Any
) -> Tensor:
    at = _windows(X.shape[2:], kernel_shape, step, ceil_mode)
    return _sums(af.abs(X) ** float(p), at) ** (1.0 / p)


def _global(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(X: Tensor) -> Tensor:
        return function(X, list(range(2, X.ndim)), keepdim=True)

    return operator


# Norms.


@taking("epsilon", "momentum", "spatial", "training_mode")
def _batch_norm(
    X: Tensor,
    scale: Tensor,
    B: Tensor,
    input_mean: Tensor,
    input_var: Tensor,
    *,
    step: StepCall,
    **how: Any,
) -> Any:
    epsilon, momentum = how.get("epsilon", 1e-5), how.get("momentum", 0.9)
    if how.get("spatial", 1) != 1:
        step.refuse("normalises each element on its own (spatial=0), which no function here does")
    if not how.get("training_mode", 0):
        if step.wants(1):
            step.refuse("has outputs beside Y, without training_mode")
        return af.batch_norm(X, input_mean, input_var, scale, B, False, 0.1, epsilon)
    axes = [0, *range(2, X.ndim)]
    along = (-1, *[1] * (X.ndim - 2))
    mean, var = af.mean(X, axes), af.var(X, axes, correction=0)
    centred = X - mean.reshape(*along)
    y = centred * af.rsqrt(var + epsilon).reshape(*along) * scale.reshape(*along)
    # The momentum weighs the old statistics, unlike torch's.
    kept = [
        old * momentum + new * (1.0 - momentum)
        for old, new in ((input_mean, mean), (input_var, var))
    ]
    return y + B.reshape(*along), *kept


def _layer_norm(
    X: Tensor,
    Scale: Tensor,
    B: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    step: StepCall,
) -> Any:
    if stash_type != 1:
        step.refuse(f"computes in float32 (stash_type 1), got {stash_type}")
    at = axis_of(axis, X.ndim, step)
    rows = X.shape[at:]
    if Scale.shape == rows and (B is None or B.shape == rows):
        y = af.layer_norm(X, rows, Scale, B, epsilon)
    else:
        y = af.layer_norm(X, rows, None, None, epsilon) * Scale
        y = y if B is None else y + B
    if len(step.step.outputs) == 1:
        return y
    axes, x = list(range(at, X.ndim)), X.to("float32")
    mean = af.mean(x, axes, keepdim=True)
    return y, mean, af.rsqrt(af.var(x, axes, correction=0, keepdim=True) + epsilon)


def _rms_norm(
    X: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    step: StepCall,
) -> Tensor:
    if stash_type != 1:
        step.refuse(f"computes in float32 (stash_type 1), got {stash_type}")
    rows = X.shape[axis_of(axis, X.ndim, step) :]
    if scale.shape == rows:
        return af.rms_norm(X, rows, scale, epsilon)
    return af.rms_norm(X, rows, None, epsilon) * scale


def _instance_norm(input: Tensor, scale: Tensor, B: Tensor, *, epsilon: float = 1e-5) -> Tensor:  # noqa: A002
    return af.instance_norm(input, None, None, scale, B, True, 0.1, epsilon)


def _group_norm(
    X: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    step: StepCall,
) -> Tensor:
    if step.opset < 21:
        step.refuse("has a scale for each group; known is that of opset 21, for each channel")
    if stash_type != 1:
        step.refuse(f"computes in float32 (stash_type 1), got {stash_type}")
    return af.group_norm(X, num_groups, scale, bias, epsilon)


def _lrn(
    X: Tensor,
    *,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    bias: float = 1.0,
    step: StepCall,
) -> Tensor:
    if size % 2:
        return af.local_response_norm(X, size, alpha, beta, bias)
    return step.refuse(f"has an even size {size}, whose window lies otherwise here")


def _lp_norm(input: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:  # noqa: A002
    size = af.norm(input, float(p), axis, keepdim=True)
    return af.where(size == 0, 0.0, input / af.where(size == 0, 1.0, size))


def _mean_variance_norm(X: Tensor, *, axes: Sequence[int] = (0, 2, 3)) -> Tensor:
    centred = X - af.mean(X, list(axes), keepdim=True)
    deviation = af.sqrt(af.mean(af.square(centred), list(axes), keepdim=True))
    return centred / (deviation + 1e-9)


def _dropout(
    data: Tensor,
    ratio: Known | None = None,
    training_mode: Known | None = None,
    *,
    seed: int | None = None,  # of a mask that is never drawn
    step: StepCall,
) -> Any:
    part = 0.5 if ratio is None else float(ratio.reshape(()))
    if training_mode is not None and bool(training_mode.reshape(())) and part > 0:
        step.refuse(
            "draws a mask (training_mode), which would be another one here than in any other"
            " runtime; export the model for inference"
        )
    return (data, as_tensor(np.ones((), bool)).broadcast_to(*data.shape)) if step.wants(1) else data


# Losses.


def _nll_loss(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    return af.nll_loss(input, target.to("int64"), weight, ignore_index, reduction)


def _cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    step: StepCall,
) -> Any:
    rows = af.log_softmax(scores, 1)
    loss = af.nll_loss(rows, labels.to("int64"), weights, ignore_index, reduction)
    return (loss, rows) if step.wants(1) else loss


# Resizing.


def _scaled_sizes(
    shape: Extents, scales: Known | None, sizes: Known | None, axes: Any, step: StepCall
) -> tuple[list[int], list[float]]:
    """Return extents and scales of all axes."""
    chosen = [axis_of(a, len(shape), step) for a in (range(len(shape)) if axes is None else axes)]
    extents, factors = list(shape), [1.0] * len(shape)
    given = sizes if sizes is not None and sizes.size else scales
    if given is None or len(given) != len(chosen):
        step.refuse("needs scales or sizes for each axis")
    for axis, number in zip(chosen, given.tolist(), strict=True):
        if given is sizes:
            extents[axis], factors[axis] = int(number), number / max(shape[axis], 1)
        else:
            extents[axis], factors[axis] = math.floor(shape[axis] * number), float(number)
    return extents, factors


def _places(extent: int, count: int, scale: float, where: str, step: StepCall) -> Array:
    """Return where along an axis of `extent` elements each of `count` lies, float64."""
    at = np.arange(count, dtype=np.float64)
    centres = (at + 0.5) / scale - 0.5
    places = {
        "half_pixel": centres,
        "pytorch_half_pixel": centres * (count > 1),
        "asymmetric": at / scale,
        "align_corners": at * (extent - 1) / ((scale * extent - 1) or 1.0),
    }
    if where not in places:
        step.refuse(f"knows the coordinates {', '.join(places)}, got {where!r}")
    return places[where]


_ROUNDED: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


_RESIZE_DEFAULTS = {
    "antialias": 0,
    "exclude_outside": 0,
    "keep_aspect_ratio_policy": "stretch",
    "extrapolation_value": 0.0,
    "cubic_coeff_a": -0.75,
}


@taking(*_RESIZE_DEFAULTS, "coordinate_transformation_mode", "mode", "nearest_mode")
def _resize(
    X: Tensor,
    roi: Known | None = None,
    scales: Known | None = None,
    sizes: Known | None = None,
    *,
    axes: Any = None,
    step: StepCall,
    **how: Any,
) -> Tensor:
    for name, default in _RESIZE_DEFAULTS.items():
        if how.get(name, default) != default:
            step.refuse(f"has {name} {how[name]!r}; known is {default!r}")
    mode = how.get("mode", "nearest")
    where = how.get("coordinate_transformation_mode", "half_pixel")
    rounds = how.get("nearest_mode", "round_prefer_floor")
    extents, factors = _scaled_sizes(X.shape, scales, sizes, axes, step)
    for axis, (n, count) in enumerate(zip(X.shape, extents, strict=True)):
        if count == n and factors[axis] == 1.0:
            continue
        if mode not in ("nearest", "linear"):
            step.refuse(f"resizes by 'nearest' and 'linear', got {mode!r}")
        at = _places(n, count, factors[axis], where, step)
        if mode == "linear":
            X = _linear(X, axis, at)
            continue
        if rounds not in _ROUNDED:
            step.refuse(f"knows the roundings {', '.join(_ROUNDED)}, got {rounds!r}")
        X = af.index_select(X, axis, np.clip(_ROUNDED[rounds](at), 0, n - 1).astype(np.int64))
    return X


def _linear(X: Tensor, axis: int, places: Array) -> Tensor:
    extent = X.shape[axis]
    x = np.clip(places, 0, extent - 1)
    low = np.floor(x).astype(np.int64)
    high = np.minimum(low + 1, extent - 1)
    part = (x - low).astype(X.dtype.value).reshape(-1, *[1] * (X.ndim - axis - 1))
    first, second = af.index_select(X, axis, low), af.index_select(X, axis, high)
    blend: Tensor = first + (second - first) * part
    return blend


def _upsample(X: Tensor, scales: Known, *, mode: str = "nearest", step: StepCall) -> Tensor:
    how = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    made: Tensor = _resize(X, None, scales, step=step, **how)
    return made


LAYERS: dict[str, Callable[..., Any]] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "GlobalAveragePool": _global(af.mean),
    "GlobalMaxPool": _global(af.amax),
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_norm,
    "LpPool": _lp_pool,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "MeanVarianceNormalization": _mean_variance_norm,
    "NegativeLogLikelihoodLoss": _nll_loss,
    "RMSNormalization": _rms_norm,
    "Resize": _resize,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
    "Upsample": _upsample,
}
