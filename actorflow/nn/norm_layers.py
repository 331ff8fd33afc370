"""Layers that normalise, with statistics that are kept or without."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow import functional
from actorflow.nn.layers import checked_extent
from actorflow.nn.module import Module
from actorflow.nn.parameter import Buffer, Parameter
from actorflow.tensor.literals import checked_number
from actorflow.tensor.tensor import Tensor, integers
from actorflow.tensor.tracer import current_trace, find_source
from compiler.contract.errors import CompileError

_ONES, _ZEROS = (("kind", "ones"),), (("kind", "zeros"),)


class BatchNormBase(Module):
    """What the layers of one, two and three axes have in common; `ranks` are those of tensors."""

    ranks: tuple[int, ...]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        track: bool = True,
    ) -> None:
        name = type(self).__name__
        shape = (checked_extent(name, "num_features", num_features),)
        self.eps = checked_number(eps, f"eps of {name}")
        self.momentum = (
            None if momentum is None else checked_number(momentum, f"momentum of {name}")
        )
        self.track = track
        self.weight = Parameter(shape, _ONES) if affine else None
        self.bias = Parameter(shape, _ZEROS) if affine else None
        self.running_mean = Buffer(shape) if track_running_stats else None
        self.running_var = Buffer(shape, _ONES) if track_running_stats else None
        self.num_batches_tracked = Buffer((), dtype="int64") if track_running_stats else None

    @property
    def is_updated(self) -> bool:
        """Whether a job that trains is traced, and may change the statistics."""
        trace = current_trace()
        return trace is not None and trace.is_training and self.track

    def check(self, x: Tensor) -> None:
        """Raise CompileError for tensors of other axes."""
        if x.ndim not in self.ranks:
            raise CompileError(
                f"{find_source()}: {type(self).__name__} takes tensors of"
                f" {' or '.join(map(str, self.ranks))} axes, [N, C, ...], got {x.type}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        self.check(x)
        is_training = self.is_updated
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None and is_training:
            self.num_batches_tracked.assign(self.num_batches_tracked + 1)
            if self.momentum is None:
                momentum = 1.0 / self.num_batches_tracked.to(x.dtype)
        return functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=is_training or self.running_mean is None,
            momentum=momentum,
            eps=self.eps,
        )


class BatchNorm1d(BatchNormBase):
    """Batch normalisation of [N, C] or [N, C, L].

    Normalise each channel: in training by the batch's statistics, else by the running ones.

    `weight` starts at 1, `bias` at 0, `running_mean` at 0, `running_var` at 1, all [C]; the count
    `num_batches_tracked` is int64. A job that trains (`train=True`) updates the running
    statistics, once per batch; one that does not reads them.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: share of the new statistics; None for the mean over all batches so far.
        affine: whether there are weight and bias.
        track_running_stats: False keeps no statistics; every batch is normalised by its own.
        track: False freezes the running statistics: training jobs normalise by them, too, as
            torch's layer does after eval(). It may be set at any time: `layer.track = False`.
    """

    ranks = (2, 3)


class BatchNorm2d(BatchNormBase):
    """Batch normalisation of [N, C, H, W]; see `BatchNorm1d`."""

    ranks = (4,)


class BatchNorm3d(BatchNormBase):
    """Batch normalisation of [N, C, D, H, W]; see `BatchNorm1d`."""

    ranks = (5,)


class InstanceNorm1d(BatchNormBase):
    """Normalise each channel of each sample of x [N, C, L].

    With `affine`, `weight` [C] starts at 1 and `bias` at 0. With `track_running_stats` a job that
    trains keeps running means of the statistics, and one that does not normalises by them; see
    `BatchNorm1d` for the arguments.
    """

    ranks: tuple[int, ...] = (3,)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        *,
        track: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, track=track)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        self.check(x)
        return functional.instance_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            use_input_stats=self.is_updated or self.running_mean is None,
            momentum=0.0 if self.momentum is None else self.momentum,
            eps=self.eps,
        )


class InstanceNorm2d(InstanceNorm1d):
    """The same for x [N, C, H, W]."""

    ranks = (4,)


class InstanceNorm3d(InstanceNorm1d):
    """The same for x [N, C, D, H, W]."""

    ranks = (5,)


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
