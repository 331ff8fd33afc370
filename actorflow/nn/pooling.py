"""Pools as layers: functions of `functional.pooling` with their windows held."""

from __future__ import annotations

from actorflow import functional
from actorflow.functional.convolution import Sizes
from actorflow.nn.function_layer import FunctionLayer


class _MaxPool(FunctionLayer):
    """The largest element of each window. The order of arguments is torch's, for layers."""

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode, return_indices)


class MaxPool1d(_MaxPool, function=functional.max_pool1d):
    """See `functional.max_pool1d`."""


class MaxPool2d(_MaxPool, function=functional.max_pool2d):
    """See `functional.max_pool2d`."""


class MaxPool3d(_MaxPool, function=functional.max_pool3d):
    """See `functional.max_pool3d`."""


class AvgPool1d(FunctionLayer, function=functional.avg_pool1d):
    """See `functional.avg_pool1d`."""


class AvgPool2d(FunctionLayer, function=functional.avg_pool2d):
    """See `functional.avg_pool2d`."""


class AvgPool3d(FunctionLayer, function=functional.avg_pool3d):
    """See `functional.avg_pool3d`."""


class AdaptiveAvgPool1d(FunctionLayer, function=functional.adaptive_avg_pool1d):
    """See `functional.adaptive_avg_pool1d`."""


class AdaptiveAvgPool2d(FunctionLayer, function=functional.adaptive_avg_pool2d):
    """See `functional.adaptive_avg_pool2d`."""


class AdaptiveAvgPool3d(FunctionLayer, function=functional.adaptive_avg_pool3d):
    """See `functional.adaptive_avg_pool3d`."""


class AdaptiveMaxPool1d(FunctionLayer, function=functional.adaptive_max_pool1d):
    """See `functional.adaptive_max_pool1d`."""


class AdaptiveMaxPool2d(FunctionLayer, function=functional.adaptive_max_pool2d):
    """See `functional.adaptive_max_pool2d`."""


class AdaptiveMaxPool3d(FunctionLayer, function=functional.adaptive_max_pool3d):
    """See `functional.adaptive_max_pool3d`."""
