"""Losses as layers: a function of `functional` with its options held."""

from __future__ import annotations

from actorflow import functional
from actorflow.nn.function_layer import FunctionLayer


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


class TripletMarginLoss(FunctionLayer, function=functional.triplet_margin_loss, operands=3):
    """`functional.triplet_margin_loss` with its options."""


class CTCLoss(FunctionLayer, function=functional.ctc_loss, operands=4):
    """`functional.ctc_loss` with its options."""
