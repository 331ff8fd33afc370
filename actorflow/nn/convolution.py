"""Convolutions as layers. Names, parameters and initialisers follow torch's."""

from __future__ import annotations

import math
from typing import Any

from actorflow.functional import convolution
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

    def __init_subclass__(cls, rank: int = 0, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._rank = rank

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


class Conv1d(_Convolution, rank=1):
    """Convolve x [N, in_channels, L]; see `functional.conv1d`."""


class Conv2d(_Convolution, rank=2):
    """Convolve x [N, in_channels, H, W]; see `functional.conv2d`."""


class Conv3d(_Convolution, rank=3):
    """Convolve x [N, in_channels, D, H, W]; see `functional.conv3d`."""


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


class ConvTranspose1d(_Transposed, rank=1):
    """The transposed convolution of x [N, in_channels, L]; see `functional.conv_transpose1d`."""


class ConvTranspose2d(_Transposed, rank=2):
    """The transposed convolution of x [N, in_channels, H, W]."""


class ConvTranspose3d(_Transposed, rank=3):
    """The transposed convolution of x [N, in_channels, D, H, W]."""
