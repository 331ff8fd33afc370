"""Losses as layers: a function of `functional` with its options held."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from actorflow import functional
from actorflow.nn.module import Module
from actorflow.tensor import Tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError


class Loss(Module):
    """Base of losses: options by keyword, of the names that the function has."""

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, **options: Any) -> None:
        known = [p.name for p in inspect.signature(self.function).parameters.values()]
        for name in options:
            if name not in known:
                raise CompileError(
                    f"{find_source()}: {type(self).__name__} knows no option {name!r}; see"
                    f" functional.{self.function.__name__}"
                )
        self.options = options

    def __call__(self, *operands: Tensor) -> Tensor:
        """Return the loss of prediction and target, or of what else the function takes."""
        return type(self).function(*operands, **self.options)


class CrossEntropyLoss(Loss):
    """`functional.cross_entropy` with its options."""

    function = staticmethod(functional.cross_entropy)


class NLLLoss(Loss):
    """`functional.nll_loss` with its options."""

    function = staticmethod(functional.nll_loss)


class MSELoss(Loss):
    """`functional.mse_loss` with its options."""

    function = staticmethod(functional.mse_loss)


class L1Loss(Loss):
    """`functional.l1_loss` with its options."""

    function = staticmethod(functional.l1_loss)


class SmoothL1Loss(Loss):
    """`functional.smooth_l1_loss` with its options."""

    function = staticmethod(functional.smooth_l1_loss)


class HuberLoss(Loss):
    """`functional.huber_loss` with its options."""

    function = staticmethod(functional.huber_loss)


class BCELoss(Loss):
    """`functional.binary_cross_entropy` with its options."""

    function = staticmethod(functional.binary_cross_entropy)


class BCEWithLogitsLoss(Loss):
    """`functional.binary_cross_entropy_with_logits` with its options."""

    function = staticmethod(functional.binary_cross_entropy_with_logits)


class KLDivLoss(Loss):
    """`functional.kl_div` with its options."""

    function = staticmethod(functional.kl_div)


class PoissonNLLLoss(Loss):
    """`functional.poisson_nll_loss` with its options."""

    function = staticmethod(functional.poisson_nll_loss)


class GaussianNLLLoss(Loss):
    """`functional.gaussian_nll_loss` with its options."""

    function = staticmethod(functional.gaussian_nll_loss)


class HingeEmbeddingLoss(Loss):
    """`functional.hinge_embedding_loss` with its options."""

    function = staticmethod(functional.hinge_embedding_loss)


class SoftMarginLoss(Loss):
    """`functional.soft_margin_loss` with its options."""

    function = staticmethod(functional.soft_margin_loss)


class MarginRankingLoss(Loss):
    """`functional.margin_ranking_loss` with its options."""

    function = staticmethod(functional.margin_ranking_loss)


class CosineEmbeddingLoss(Loss):
    """`functional.cosine_embedding_loss` with its options."""

    function = staticmethod(functional.cosine_embedding_loss)


class TripletMarginLoss(Loss):
    """`functional.triplet_margin_loss` with its options."""

    function = staticmethod(functional.triplet_margin_loss)
