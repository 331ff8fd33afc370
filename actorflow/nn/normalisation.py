"""Layers that normalise, without statistics that are kept."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow import functional
from actorflow.literals import checked_number
from actorflow.nn.layers import checked_extent
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor import Tensor, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError

_ONES, _ZEROS = (("kind", "ones"),), (("kind", "zeros"),)


class LayerNorm(Module):
    """Normalise the last axes; `weight` starts at 1, `bias` at 0, both of `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        self.normalized_shape = _shape("LayerNorm", normalized_shape)
        self.eps = checked_number(eps, "eps of LayerNorm")
        self.weight = Parameter(self.normalized_shape, _ONES) if elementwise_affine else None
        has_bias = elementwise_affine and bias
        self.bias = Parameter(self.normalized_shape, _ZEROS) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x [..., *normalized_shape]."""
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Divide by the root mean square of the last axes; `weight` starts at 1."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        self.normalized_shape = _shape("RMSNorm", normalized_shape)
        self.eps = None if eps is None else checked_number(eps, "eps of RMSNorm")
        self.weight = Parameter(self.normalized_shape, _ONES) if elementwise_affine else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x [..., *normalized_shape]."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(Module):
    """Normalise groups of channels of x [N, C, ...]; `weight` [C] starts at 1, `bias` at 0."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True
    ) -> None:
        self.num_groups = checked_extent("GroupNorm", "num_groups", num_groups)
        channels = checked_extent("GroupNorm", "num_channels", num_channels)
        if channels % self.num_groups:
            raise CompileError(
                f"{find_source()}: num_channels of GroupNorm must be divisible by num_groups, got"
                f" {channels} and {self.num_groups}"
            )
        self.eps = checked_number(eps, "eps of GroupNorm")
        self.weight = Parameter((channels,), _ONES) if affine else None
        self.bias = Parameter((channels,), _ZEROS) if affine else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        return functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def _shape(layer: str, given: int | Sequence[int]) -> tuple[int, ...]:
    extents = integers(given, what=f"an extent of {layer}")
    return tuple([checked_extent(layer, "normalized_shape", n) for n in extents])
