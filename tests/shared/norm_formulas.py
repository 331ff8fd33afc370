"""What ops of normalisation compute, in numpy's float64: for the table of ops."""

import numpy as np


def layer_norm(x, gamma, beta, eps):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps)
    return (x - mean) * rstd * gamma + beta, mean[..., 0], 0 * mean[..., 0], rstd[..., 0]


def rms_norm(x, gamma, eps):
    rstd = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return x * rstd * gamma, rstd[..., 0]


def statistics(x, kept):
    """Return the mean and one over the standard deviation of x, over axes of extent 1."""
    axes = tuple(axis for axis, extent in enumerate(kept) if extent == 1)
    return x.mean(axes, keepdims=True), (x.var(axes, keepdims=True) + 1e-3) ** -0.5


def batch_norm(x, mean, rstd, weight, bias):
    """The statistics are those of x, and follow it."""
    mean, rstd = statistics(x, mean.shape)
    return (x - mean) * rstd * weight + bias


def batch_norm_grad(dy, x, mean, slope, shift, scale):
    return (dy - ((x - mean) * slope + shift)) * scale
