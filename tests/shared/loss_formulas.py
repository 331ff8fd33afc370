"""What ops of losses compute, in numpy's float64: for the table of ops."""

import numpy as np


def losses(logits, labels):
    largest = logits.max(1)
    sums = np.log(np.exp(logits - largest[:, None]).sum(1))
    return sums + largest - logits[np.arange(len(logits)), labels.astype(int)], largest, sums


def weighted_losses(logits, labels, weight, smoothing):
    _, *statistics = losses(logits, labels)
    lse = sum(statistics)
    share = weight[labels.astype(int)]
    even = ((lse[:, None] - logits) * weight).mean(1)
    picked = logits[np.arange(len(logits)), labels.astype(int)]
    loss = (lse - picked) * share * (1 - smoothing) + even * smoothing
    return loss, share, *statistics


def soft_losses(logits, target):
    _, *statistics = losses(logits, np.zeros(len(logits)))
    return (target * (sum(statistics)[:, None] - logits)).sum(1), *statistics


def picked_losses(x, labels, weight):
    share = weight[labels.astype(int)]
    return -x[np.arange(len(x)), labels.astype(int)] * share, share


def bce_of_logits(x, y, weight):
    s = 1 / (1 + np.exp(-x))
    return -(weight * y * np.log(s) + (1 - y) * np.log(1 - s))
