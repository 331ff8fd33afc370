"""Convolutions and pools as layers. Names, parameters and initialisers follow torch's."""

from __future__ import annotations

import math
from typing import Any

from actorflow.functional import convolution, pooling
from actorflow.functional.convolution import Sizes, per_axis
from actorflow.literals import checked_size
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor import Tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError


class _Convolution(Module):
    """`weight` and `bias` start uniform in +-1 / sqrt(elements of one row of the weight)."""

    _rank = 0
    _is_transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        name, rank = type(self).__name__, self._rank
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        channels, results, self.groups = [
            checked_size(n, f"{k} of {name}") for k, n in sizes.items()
        ]
        if (
            min(channels, results, self.groups) < 1
            or channels % self.groups
            or results % self.groups
        ):
            raise CompileError(
                f"{find_source()}: {name} needs channels of 1 or more that groups divide, got"
                f" {channels}, {results} and groups={self.groups}"
            )
        kernel = per_axis(kernel_size, rank, f"kernel_size of {name}")
        self.stride = per_axis(stride, rank, f"stride of {name}")
        self.dilation = per_axis(dilation, rank, f"dilation of {name}")
        self.padding = padding
        if not isinstance(padding, str):
            self.padding = per_axis(padding, rank, f"padding of {name}", least=0)
        rows, columns = (channels, results) if self._is_transposed else (results, channels)
        shape = (rows, columns // self.groups, *kernel)
        init = (("kind", "uniform"), ("bound", 1.0 / math.sqrt(math.prod(shape[1:]))))
        self.weight = Parameter(shape, init)
        self.bias = Parameter((results,), init) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, out_channels, *positions]."""
        ways = self.stride, self.padding, self.dilation, self.groups
        return convolution.convolved(self._rank, x, self.weight, self.bias, *ways)


class Conv1d(_Convolution):
    """Convolve x [N, in_channels, L]; see `functional.conv1d`."""

    _rank = 1


class Conv2d(_Convolution):
    """Convolve x [N, in_channels, H, W]; see `functional.conv2d`."""

    _rank = 2


class Conv3d(_Convolution):
    """Convolve x [N, in_channels, D, H, W]; see `functional.conv3d`."""

    _rank = 3


class _Transposed(_Convolution):
    """The transposed convolution of a rank."""

    _is_transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias
        )
        self.output_padding = per_axis(output_padding, self._rank, "output_padding", least=0)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, out_channels, *spatial]."""
        ways: Any = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return convolution.transposed(self._rank, x, self.weight, self.bias, *ways)


class ConvTranspose1d(_Transposed):
    """The transposed convolution of x [N, in_channels, L]; see `functional.conv_transpose1d`."""

    _rank = 1


class ConvTranspose2d(_Transposed):
    """The transposed convolution of x [N, in_channels, H, W]."""

    _rank = 2


class ConvTranspose3d(_Transposed):
    """The transposed convolution of x [N, in_channels, D, H, W]."""

    _rank = 3


class _MaxPool(Module):
    """The largest element of each window."""

    _rank = 0

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.dilation, self.return_indices, self.ceil_mode = dilation, return_indices, ceil_mode

    def __call__(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return [N, C, *positions]."""
        windows = self.kernel_size, self.stride, self.padding, self.dilation
        return pooling.max_pool(self._rank, x, *windows, self.ceil_mode, self.return_indices)


class MaxPool1d(_MaxPool):
    """See `functional.max_pool1d`."""

    _rank = 1


class MaxPool2d(_MaxPool):
    """See `functional.max_pool2d`."""

    _rank = 2


class MaxPool3d(_MaxPool):
    """See `functional.max_pool3d`."""

    _rank = 3


class _AvgPool(Module):
    """The mean of each window."""

    _rank = 0

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: float | None = None,
    ) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad
        self.divisor_override = divisor_override

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, C, *positions]."""
        windows = self.kernel_size, self.stride, self.padding, self.ceil_mode
        counted = self.count_include_pad, self.divisor_override
        return pooling.avg_pool(self._rank, x, *windows, *counted)


class AvgPool1d(_AvgPool):
    """See `functional.avg_pool1d`."""

    _rank = 1


class AvgPool2d(_AvgPool):
    """See `functional.avg_pool2d`."""

    _rank = 2


class AvgPool3d(_AvgPool):
    """See `functional.avg_pool3d`."""

    _rank = 3


class _Adaptive(Module):
    """A function of `functional` with an output size."""

    _function = ""

    def __init__(self, output_size: Sizes) -> None:
        self.output_size = output_size

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, C, *output_size]."""
        pooled: Tensor = getattr(pooling, self._function)(x, self.output_size)
        return pooled


class AdaptiveAvgPool1d(_Adaptive):
    """See `functional.adaptive_avg_pool1d`."""

    _function = "adaptive_avg_pool1d"


class AdaptiveAvgPool2d(_Adaptive):
    """See `functional.adaptive_avg_pool2d`."""

    _function = "adaptive_avg_pool2d"


class AdaptiveAvgPool3d(_Adaptive):
    """See `functional.adaptive_avg_pool3d`."""

    _function = "adaptive_avg_pool3d"


class AdaptiveMaxPool1d(_Adaptive):
    """See `functional.adaptive_max_pool1d`."""

    _function = "adaptive_max_pool1d"


class AdaptiveMaxPool2d(_Adaptive):
    """See `functional.adaptive_max_pool2d`."""

    _function = "adaptive_max_pool2d"


class AdaptiveMaxPool3d(_Adaptive):
    """See `functional.adaptive_max_pool3d`."""

    _function = "adaptive_max_pool3d"
