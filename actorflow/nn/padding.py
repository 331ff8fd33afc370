"""Layers that pad the spatial axes of x [N, C, *spatial] or [C, *spatial]; see `functional.pad`."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow import functional
from actorflow.nn.module import Module
from actorflow.tensor.tensor import Operand, Tensor, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError

Padding = int | Sequence[int]
"""One width for all sides, or a width before and behind each axis, of the last axis first."""


class _Padding(Module):
    """What the layers have in common: the number of spatial axes, and the mode of `pad`.

    Raises CompileError for any other number of widths, and for tensors of other axes.
    """

    _rank = 0
    _mode = "constant"

    def __init_subclass__(cls, rank: int = 0, mode: str = "", **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._rank, cls._mode = rank or cls._rank, mode or cls._mode

    def __init__(self, padding: Padding) -> None:
        name, count = type(self).__name__, 2 * self._rank
        widths = integers(padding, what=f"a width of {name}")
        widths = widths * count if len(widths) == 1 else widths
        if len(widths) != count:
            raise CompileError(
                f"{find_source()}: {name} takes one width, or {count}: before and behind each of"
                f" {self._rank} axes, the last one first; got {padding!r}"
            )
        self.padding = widths

    def __call__(self, x: Tensor) -> Tensor:
        """Return x with wider spatial axes, or narrower ones where a width is negative."""
        if x.ndim not in (self._rank + 1, self._rank + 2):
            raise CompileError(
                f"{find_source()}: {type(self).__name__} pads the last {self._rank} axes of tensors"
                f" of {self._rank + 1} or {self._rank + 2} axes, got {x.type}"
            )
        return functional.pad(x, self.padding, self._mode)


class _ConstantPad(_Padding):
    """Pads with `value`. Tensors may have any axes before those that are padded, as in torch."""

    def __init__(self, padding: Padding, value: Operand) -> None:
        super().__init__(padding)
        self.value = value

    def __call__(self, x: Tensor) -> Tensor:
        """Return x with wider axes, or narrower ones where a width is negative."""
        return functional.pad(x, self.padding, value=self.value)


class ConstantPad1d(_ConstantPad, rank=1):
    """Pad the last axis with `value`."""


class ConstantPad2d(_ConstantPad, rank=2):
    """Pad the last two axes with `value`."""


class ConstantPad3d(_ConstantPad, rank=3):
    """Pad the last three axes with `value`."""


class _ZeroPad(_ConstantPad):
    """Pads with 0."""

    def __init__(self, padding: Padding) -> None:
        super().__init__(padding, 0)


class ZeroPad1d(_ZeroPad, rank=1):
    """Pad the last axis with 0."""


class ZeroPad2d(_ZeroPad, rank=2):
    """Pad the last two axes with 0."""


class ZeroPad3d(_ZeroPad, rank=3):
    """Pad the last three axes with 0."""


class ReflectionPad1d(_Padding, rank=1, mode="reflect"):
    """Pad x [N, C, L] with its reflection; the edge itself is not repeated."""


class ReflectionPad2d(_Padding, rank=2, mode="reflect"):
    """Pad x [N, C, H, W] with its reflection; the edge itself is not repeated."""


class ReflectionPad3d(_Padding, rank=3, mode="reflect"):
    """Pad x [N, C, D, H, W] with its reflection; the edge itself is not repeated."""


class ReplicationPad1d(_Padding, rank=1, mode="replicate"):
    """Pad x [N, C, L] with its edge."""


class ReplicationPad2d(_Padding, rank=2, mode="replicate"):
    """Pad x [N, C, H, W] with its edge."""


class ReplicationPad3d(_Padding, rank=3, mode="replicate"):
    """Pad x [N, C, D, H, W] with its edge."""


class CircularPad1d(_Padding, rank=1, mode="circular"):
    """Pad x [N, C, L] with its other end."""


class CircularPad2d(_Padding, rank=2, mode="circular"):
    """Pad x [N, C, H, W] with its other end."""


class CircularPad3d(_Padding, rank=3, mode="circular"):
    """Pad x [N, C, D, H, W] with its other end."""
