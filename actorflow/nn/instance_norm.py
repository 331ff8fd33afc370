"""Normalisation of each channel of each sample, perhaps with statistics that are kept."""

from __future__ import annotations

from actorflow import functional
from actorflow.nn.batch_norm import BatchNormBase
from actorflow.tensor import Tensor


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
