"""Convolutions and their transposes over 1 to 3 axes, and the windows of images as columns.

Tensors are [N, C, *spatial], as in torch; a tensor without the axis N is one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from actorflow.functional.arranging import pad
from actorflow.functional.shape import stack
from actorflow.tensor.literals import checked_size, of_ranks
from actorflow.tensor.tensor import Tensor, apply, as_tensor, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import MOST_ELEMENTS
from compiler.ops.primitives import slicing
from compiler.ops.primitives.convolution import CONV, CONV_INPUT_GRAD

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "fold",
    "unfold",
]


Sizes = int | Sequence[int]
"""A number for each spatial axis, or one for all of them."""


def convolved(
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve x with weight; as in torch it is a cross-correlation.

    Args:
        rank: number of spatial axes.
        x: [N, C, *spatial], or [C, *spatial].
        weight: [O, C / groups, *kernel].
        bias: [O], or None.
        stride: steps between windows.
        padding: zeros on both sides of an axis; "valid" for none, "same" for an output as large as
            x, which needs a stride of 1.
        dilation: steps between the elements of a window.
        groups: channels and results are cut into so many groups, each convolved on its own.
    """
    name = f"conv{rank}d"
    images, weight = batched(x, rank, name), as_tensor(weight)
    strides, dilations = per_axis(stride, rank, "stride"), per_axis(dilation, rank, "dilation")
    _expect_weight(weight, rank, name)
    if isinstance(padding, str):
        low, high = _named_padding(padding, weight.shape[2:], strides, dilations)
    else:
        low = high = per_axis(padding, rank, "padding", least=0)
    y = apply(
        CONV,
        images,
        weight,
        strides=strides,
        low=low,
        high=high,
        dilation=dilations,
        groups=checked_size(groups, "groups"),
    )
    return _finished(y, bias, x, rank)


def transposed(
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """Return what the gradient of a convolution makes of x: the transposed convolution.

    Args:
        rank: number of spatial axes.
        x: [N, C, *spatial], or [C, *spatial].
        weight: [C, O / groups, *kernel].
        bias: [O], or None.
        stride: that of the convolution whose transpose it is; so are the others.
        padding: taken away from both sides of an axis.
        output_padding: rows and columns that are added behind, fewer than the stride or dilation.
        groups: channels and results are cut into so many groups.
        dilation: steps between the elements of a window.
    """
    name = f"conv_transpose{rank}d"
    images, weight = batched(x, rank, name), as_tensor(weight)
    _expect_weight(weight, rank, name)
    strides, dilations = per_axis(stride, rank, "stride"), per_axis(dilation, rank, "dilation")
    low = per_axis(padding, rank, "padding", least=0)
    more = per_axis(output_padding, rank, "output_padding", least=0)
    if any([m >= max(s, d) for m, s, d in zip(more, strides, dilations, strict=True)]):
        raise CompileError(
            f"{find_source()}: {name} needs an output_padding below the stride or the dilation,"
            f" got {list(more)} for a stride of {list(strides)} and a dilation of {list(dilations)}"
        )
    # Rows that a window reaches over, dilation included.
    spans = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    spatial = tuple(
        [
            # The input extent that this convolution maps to n; `m` picks one of the s that do.
            (n - 1) * s - 2 * p + span + m
            for n, s, p, span, m in zip(images.shape[2:], strides, low, spans, more, strict=True)
        ]
    )
    if min(spatial) < 1:
        raise CompileError(
            f"{find_source()}: {name} of {images.type} would have spatial extents of"
            f" {list(spatial)}; use less padding"
        )
    # Windows that a dilation above the stride would fit in behind are cut off.
    high = tuple([p - m // s * s for p, m, s in zip(low, more, strides, strict=True)])
    y = apply(
        CONV_INPUT_GRAD,
        images,
        weight,
        strides=strides,
        low=low,
        high=high,
        dilation=dilations,
        groups=checked_size(groups, "groups"),
        spatial=spatial,
    )
    return _finished(y, bias, x, rank)


conv1d, conv2d, conv3d = of_ranks(convolved, "conv")
conv_transpose1d, conv_transpose2d, conv_transpose3d = of_ranks(transposed, "conv_transpose")


def batched(x: Tensor, rank: int, name: str) -> Tensor:
    """Return [N, C, *spatial]: a single image is a batch of one."""
    x = as_tensor(x)
    if x.ndim not in (rank + 1, rank + 2):
        raise CompileError(
            f"{find_source()}: {name} expects x [N, C, *spatial] or [C, *spatial] with {rank}"
            f" spatial axes, got {x.type}"
        )
    return x if x.ndim == rank + 2 else x.reshape(1, *x.shape)


def unbatched(y: Tensor, x: Tensor, rank: int) -> Tensor:
    """Return a result without the axis that `batched` gave to x."""
    return y if as_tensor(x).ndim == rank + 2 else y.reshape(*y.shape[1:])


def per_axis(given: Any, rank: int, what: str, *, least: int = 1) -> tuple[int, ...]:
    """Return a number for each spatial axis. Raises CompileError for others."""
    sizes = integers(given, what=what)
    sizes = sizes * rank if len(sizes) == 1 else sizes
    if len(sizes) != rank or min(sizes) < least or max(sizes) > MOST_ELEMENTS:
        raise CompileError(
            f"{find_source()}: {what} must be one integer of {least} or more, or {rank} of them,"
            f" and at most {MOST_ELEMENTS:,}, got {given!r}"
        )
    return sizes


def _expect_weight(weight: Tensor, rank: int, name: str) -> None:
    if weight.ndim != rank + 2:
        raise CompileError(
            f"{find_source()}: {name} expects a weight of {rank + 2} axes, got {weight.type}"
        )


def _named_padding(
    name: str, kernel: tuple[int, ...], strides: tuple[int, ...], apart: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a padding's name puts before and behind; "same" puts the odd one behind."""
    if name == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if name != "same":
        raise CompileError(
            f"{find_source()}: padding must be integers, 'same' or 'valid', got {name!r}"
        )
    if {*strides} != {1}:
        raise CompileError(
            f"{find_source()}: padding 'same' needs a stride of 1, got {list(strides)}"
        )
    spans = [(k - 1) * d for k, d in zip(kernel, apart, strict=True)]
    return tuple([span // 2 for span in spans]), tuple([span - span // 2 for span in spans])


def _finished(y: Tensor, bias: Tensor | None, x: Tensor, rank: int) -> Tensor:
    if bias is not None:
        bias = as_tensor(bias)
        if bias.shape != (y.shape[1],):
            raise CompileError(
                f"{find_source()}: a convolution to {y.shape[1]} channels expects a bias of shape"
                f" [{y.shape[1]}], got {bias.type}"
            )
        y = y + bias.reshape(y.shape[1], *[1] * rank)
    return unbatched(y, x, rank)


class _ColumnWindows:
    """Where the windows of an image of `extents` lie, and what each of their elements reads."""

    def __init__(
        self,
        what: str,
        extents: tuple[int, ...],
        kernel_size: Sizes,
        dilation: Sizes,
        padding: Sizes,
        stride: Sizes,
    ) -> None:
        self.kernel = per_axis(kernel_size, 2, "kernel_size")
        self.apart, self.steps = per_axis(dilation, 2, "dilation"), per_axis(stride, 2, "stride")
        self.padding = per_axis(padding, 2, "padding", least=0)
        self.wide = tuple([n + 2 * p for n, p in zip(extents, self.padding, strict=True)])
        spans = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.apart, strict=True)]
        free = [n - span for n, span in zip(self.wide, spans, strict=True)]
        if min(free) < 0:
            raise CompileError(
                f"{find_source()}: {what} has windows of {spans} elements for an image of"
                f" {list(self.wide)}, padding included; use more padding or smaller windows"
            )
        self.counts = tuple([n // step + 1 for n, step in zip(free, self.steps, strict=True)])

    def firsts(self) -> list[tuple[int, ...]]:
        """Return where each element of the first window lies."""
        # Row-major, as the columns of torch's unfold are ordered within a channel.
        taps = product(*[range(k) for k in self.kernel])
        return [tuple([t * d for t, d in zip(tap, self.apart, strict=True)]) for tap in taps]

    def spans(self) -> tuple[int, ...]:
        """Return how far it is from an element of the first window to that of the last."""
        return tuple([(n - 1) * s + 1 for n, s in zip(self.counts, self.steps, strict=True)])


def unfold(
    x: Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Tensor:
    """Return the windows of images as columns: x [N, C, H, W] -> [N, C kh kw, windows].

    Also of one image, [C, H, W]. Windows along one axis of any tensor are `tensor.unfold`.

    Args:
        x: the images.
        kernel_size: extents of a window.
        dilation: steps between the elements of a window.
        padding: zeros on both sides of an axis.
        stride: steps between windows.
    """
    images = batched(x, 2, "unfold")
    windows = _ColumnWindows("unfold", images.shape[2:], kernel_size, dilation, padding, stride)
    (above, left), (down, right) = windows.padding, windows.steps
    images = pad(images, (left, left, above, above)) if above or left else images
    high, wide = windows.spans()
    # One strided slice for each element of the window: kh kw ops, whatever the image's size.
    parts = [images[:, :, i : i + high : down, j : j + wide : right] for i, j in windows.firsts()]
    count = windows.counts[0] * windows.counts[1]
    columns = stack(parts, 2).reshape(images.shape[0], images.shape[1] * len(parts), count)
    return unbatched(columns, x, 2)


def fold(
    x: Tensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor:
    """Add columns up to images, where `unfold` would have taken them from.

    Args:
        x: [N, C kh kw, windows], or without N.
        output_size: H and W of the images.
        kernel_size: as of `unfold`, and so are the others.
        dilation: see `unfold`.
        padding: what is cut off on both sides of an axis.
        stride: see `unfold`.
    """
    tensor = as_tensor(x)
    extents = per_axis(output_size, 2, "output_size")
    windows = _ColumnWindows("fold", extents, kernel_size, dilation, padding, stride)
    taps, count = windows.firsts(), windows.counts[0] * windows.counts[1]
    if tensor.ndim not in (2, 3) or tensor.shape[-2] % len(taps) or tensor.shape[-1] != count:
        raise CompileError(
            f"{find_source()}: fold to {list(extents)} expects columns [N, C * {len(taps)},"
            f" {count}], got {tensor.type}"
        )
    columns = tensor if tensor.ndim == 3 else tensor.reshape(1, *tensor.shape)
    batch, channels = columns.shape[0], columns.shape[1] // len(taps)
    parts = columns.reshape(batch, channels, len(taps), *windows.counts)
    total: Tensor | None = None
    for number, tap in enumerate(taps):
        # The transpose of a strided slice: elements are put `steps` apart, with zeros around.
        behind = [n - t - s for n, t, s in zip(windows.wide, tap, windows.spans(), strict=True)]
        low, high, steps = (0, 0, *tap), (0, 0, *behind), (1, 1, *windows.steps)
        placed = apply(slicing.PAD, parts[:, :, number], low=low, high=high, steps=steps)
        total = placed if total is None else total + placed
    assert total is not None  # a window has an element
    above, left = windows.padding
    images = total[:, :, above : above + extents[0], left : left + extents[1]]
    return images if tensor.ndim == 3 else images.reshape(images.shape[1:])
