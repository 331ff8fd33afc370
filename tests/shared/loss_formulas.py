"""What ops of losses compute, in numpy's float64: for the table of ops."""

import numpy as np


def losses(logits, labels):
    largest = logits.max(1)
    sums = np.log(np.exp(logits - largest[:, None]).sum(1)) + largest
    return sums - logits[np.arange(len(logits)), labels.astype(int)], sums


def weighted_losses(logits, labels, weight, smoothing):
    _, lse = losses(logits, labels)
    share = weight[labels.astype(int)]
    even = ((lse[:, None] - logits) * weight).mean(1)
    picked = logits[np.arange(len(logits)), labels.astype(int)]
    return (lse - picked) * share * (1 - smoothing) + even * smoothing, share, lse


def soft_losses(logits, target):
    lse = np.log(np.exp(logits).sum(1))
    return (target * (lse[:, None] - logits)).sum(1), lse


def picked_losses(x, labels, weight):
    share = weight[labels.astype(int)]
    return -x[np.arange(len(x)), labels.astype(int)] * share, share


def bce_of_logits(x, y, weight):
    s = 1 / (1 + np.exp(-x))
    return -(weight * y * np.log(s) + (1 - y) * np.log(1 - s))
