"""Functions of `functional` as layers that keep their options: activations, losses, pools.

A new layer of this kind is one line: its function, and how many operands a call has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, cast

from actorflow import functional
from actorflow.functional.convolution import Sizes
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor.habits import hints
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError


class FunctionLayer(Module):
    """Base of layers that call a function: operands are given in the call, all else is held.

    What is held are attributes of the names that the function's arguments have.

        class MSELoss(FunctionLayer, function=functional.mse_loss, operands=2): ...
    """

    _function: ClassVar[Callable[..., Any]]
    _held: ClassVar[inspect.Signature]

    def __init_subclass__(
        cls, function: Callable[..., Any] | None = None, operands: int = 1, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if function is not None:
            signature = inspect.signature(function)
            cls._function = staticmethod(function)
            cls._held = signature.replace(parameters=[*signature.parameters.values()][operands:])
        if cls.__init__ is FunctionLayer.__init__ and function is not None:
            cls.__signature__ = cls._held  # type: ignore[attr-defined]  # what help() shows

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Keep what the function takes after its operands. Raises CompileError for all else."""
        try:
            bound = self._held.bind(*args, **kwargs)
        except TypeError as error:
            raise CompileError(
                f"{find_source()}: {type(self).__name__}: {error}; it takes {self._held}"
                f"{hints(kwargs.keys() - self._held.parameters.keys())}"
            ) from None
        vars(self).update(bound.arguments)

    def __call__(self, *operands: Any) -> Tensor:
        """Return the function of the operands.

        Its type is that of one tensor; places that a pool also returns are unpacked from it.
        """
        attributes = vars(self)  # which may have attributes of the user's own, too
        options = {name: attributes[name] for name in self._held.parameters if name in attributes}
        return cast("Tensor", type(self)._function(*operands, **options))


class CELU(FunctionLayer, function=functional.celu):
    """See `functional.celu`."""


class ELU(FunctionLayer, function=functional.elu):
    """See `functional.elu`."""


class GELU(FunctionLayer, function=functional.gelu):
    """See `functional.gelu`."""


class GLU(FunctionLayer, function=functional.glu):
    """See `functional.glu`."""


class Hardshrink(FunctionLayer, function=functional.hardshrink):
    """See `functional.hardshrink`."""


class Hardsigmoid(FunctionLayer, function=functional.hardsigmoid):
    """See `functional.hardsigmoid`."""


class Hardswish(FunctionLayer, function=functional.hardswish):
    """See `functional.hardswish`."""


class Hardtanh(FunctionLayer, function=functional.hardtanh):
    """See `functional.hardtanh`."""


class LeakyReLU(FunctionLayer, function=functional.leaky_relu):
    """See `functional.leaky_relu`."""


class LogSigmoid(FunctionLayer, function=functional.logsigmoid):
    """See `functional.logsigmoid`."""


class LogSoftmax(FunctionLayer, function=functional.log_softmax):
    """See `functional.log_softmax`."""


class Mish(FunctionLayer, function=functional.mish):
    """See `functional.mish`."""


class ReLU(FunctionLayer, function=functional.relu):
    """See `functional.relu`."""


class ReLU6(FunctionLayer, function=functional.relu6):
    """See `functional.relu6`."""


class SELU(FunctionLayer, function=functional.selu):
    """See `functional.selu`."""


class SiLU(FunctionLayer, function=functional.silu):
    """See `functional.silu`."""


class Sigmoid(FunctionLayer, function=functional.sigmoid):
    """See `functional.sigmoid`."""


class Softmax(FunctionLayer, function=functional.softmax):
    """See `functional.softmax`."""


class Softmin(FunctionLayer, function=functional.softmin):
    """See `functional.softmin`."""


class Softplus(FunctionLayer, function=functional.softplus):
    """See `functional.softplus`."""


class Softshrink(FunctionLayer, function=functional.softshrink):
    """See `functional.softshrink`."""


class Softsign(FunctionLayer, function=functional.softsign):
    """See `functional.softsign`."""


class Tanh(FunctionLayer, function=functional.tanh):
    """See `functional.tanh`."""


class Tanhshrink(FunctionLayer, function=functional.tanhshrink):
    """See `functional.tanhshrink`."""


class Threshold(FunctionLayer, function=functional.threshold):
    """See `functional.threshold`."""


class PReLU(Module):
    """x, times `weight` [num_parameters] below 0; one number, or one per channel of axis 1."""

    def __init__(self, num_parameters: int = 1, *, init: float = 0.25) -> None:
        count = checked_size(num_parameters, "num_parameters of PReLU")
        start = checked_number(init, "init of PReLU")
        self.weight = Parameter((count,), (("kind", "constant"), ("value", start)))

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        return functional.prelu(x, self.weight)


class CrossEntropyLoss(FunctionLayer, function=functional.cross_entropy, operands=2):
    """`functional.cross_entropy` with its options."""


class NLLLoss(FunctionLayer, function=functional.nll_loss, operands=2):
    """`functional.nll_loss` with its options."""


class MSELoss(FunctionLayer, function=functional.mse_loss, operands=2):
    """`functional.mse_loss` with its options."""


class L1Loss(FunctionLayer, function=functional.l1_loss, operands=2):
    """`functional.l1_loss` with its options."""


class SmoothL1Loss(FunctionLayer, function=functional.smooth_l1_loss, operands=2):
    """`functional.smooth_l1_loss` with its options."""


class HuberLoss(FunctionLayer, function=functional.huber_loss, operands=2):
    """`functional.huber_loss` with its options."""


class BCELoss(FunctionLayer, function=functional.binary_cross_entropy, operands=2):
    """`functional.binary_cross_entropy` with its options."""


class BCEWithLogitsLoss(
    FunctionLayer, function=functional.binary_cross_entropy_with_logits, operands=2
):
    """`functional.binary_cross_entropy_with_logits` with its options."""


class KLDivLoss(FunctionLayer, function=functional.kl_div, operands=2):
    """`functional.kl_div` with its options."""


class PoissonNLLLoss(FunctionLayer, function=functional.poisson_nll_loss, operands=2):
    """`functional.poisson_nll_loss` with its options."""


class GaussianNLLLoss(FunctionLayer, function=functional.gaussian_nll_loss, operands=3):
    """`functional.gaussian_nll_loss` with its options."""


class HingeEmbeddingLoss(FunctionLayer, function=functional.hinge_embedding_loss, operands=2):
    """`functional.hinge_embedding_loss` with its options."""


class SoftMarginLoss(FunctionLayer, function=functional.soft_margin_loss, operands=2):
    """`functional.soft_margin_loss` with its options."""


class MarginRankingLoss(FunctionLayer, function=functional.margin_ranking_loss, operands=3):
    """`functional.margin_ranking_loss` with its options."""


class CosineEmbeddingLoss(FunctionLayer, function=functional.cosine_embedding_loss, operands=3):
    """`functional.cosine_embedding_loss` with its options."""


class CosineSimilarity(FunctionLayer, function=functional.cosine_similarity, operands=2):
    """`functional.cosine_similarity` with its options."""


class PairwiseDistance(FunctionLayer, function=functional.pairwise_distance, operands=2):
    """`functional.pairwise_distance` with its options."""


class TripletMarginLoss(FunctionLayer, function=functional.triplet_margin_loss, operands=3):
    """`functional.triplet_margin_loss` with its options."""


class CTCLoss(FunctionLayer, function=functional.ctc_loss, operands=4):
    """`functional.ctc_loss` with its options."""


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
