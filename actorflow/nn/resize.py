"""Layers that make images larger or smaller, or columns of their windows."""

from __future__ import annotations

from actorflow import functional
from actorflow.nn.function_layer import FunctionLayer


class Upsample(FunctionLayer, function=functional.interpolate):
    """See `functional.interpolate`."""


class PixelShuffle(FunctionLayer, function=functional.pixel_shuffle):
    """See `functional.pixel_shuffle`."""


class PixelUnshuffle(FunctionLayer, function=functional.pixel_unshuffle):
    """See `functional.pixel_unshuffle`."""


class ChannelShuffle(FunctionLayer, function=functional.channel_shuffle):
    """See `functional.channel_shuffle`."""


class Unfold(FunctionLayer, function=functional.unfold):
    """See `functional.unfold`."""


class Fold(FunctionLayer, function=functional.fold):
    """See `functional.fold`."""
