"""Windows of images as columns, and back: what torch.nn.functional calls unfold and fold."""

from __future__ import annotations

from itertools import product

from actorflow.functional.convolution import Sizes, batched, per_axis, unbatched
from actorflow.functional.creating import pad
from actorflow.functional.shape import stack
from actorflow.tensor import Tensor, apply, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import slicing

__all__ = ["fold", "unfold"]


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
    given = as_tensor(x)
    extents = per_axis(output_size, 2, "output_size")
    windows = _ColumnWindows("fold", extents, kernel_size, dilation, padding, stride)
    taps, count = windows.firsts(), windows.counts[0] * windows.counts[1]
    if given.ndim not in (2, 3) or given.shape[-2] % len(taps) or given.shape[-1] != count:
        raise CompileError(
            f"{find_source()}: fold to {list(extents)} expects columns [N, C * {len(taps)},"
            f" {count}], got {given.type}"
        )
    columns = given if given.ndim == 3 else given.reshape(1, *given.shape)
    batch, channels = columns.shape[0], columns.shape[1] // len(taps)
    parts = columns.reshape(batch, channels, len(taps), *windows.counts)
    total: Tensor | None = None
    for number, tap in enumerate(taps):
        behind = [n - t - s for n, t, s in zip(windows.wide, tap, windows.spans(), strict=True)]
        low, high, steps = (0, 0, *tap), (0, 0, *behind), (1, 1, *windows.steps)
        placed = apply(slicing.PAD, parts[:, :, number], low=low, high=high, steps=steps)
        total = placed if total is None else total + placed
    assert total is not None  # a window has an element
    above, left = windows.padding
    images = total[:, :, above : above + extents[0], left : left + extents[1]]
    return images if given.ndim == 3 else images.reshape(images.shape[1:])
