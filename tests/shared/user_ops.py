"""Ops of a user, in a file of the user's: what `test_user_ops` trains, counts and breaks."""

import numpy as np

import actorflow as af


@af.op("x -> y")
def softsign(x):
    return x / (1 + abs(x))


@af.op("x[*, D], gamma[D] -> y[*, D]")
def rms_scale(x, gamma, *, eps: float = 1e-6):
    return x * ((x * x).mean() + eps).rsqrt() * gamma


@af.op("x[*, D] -> y[*, D]")
def normal_rows(x, *, eps: float = 1e-5):
    difference = x - x.mean()
    return difference * ((difference * difference).mean() + eps).rsqrt()


def group_norm(x, weight, bias, groups):
    batch, channels, *rest = x.shape
    y = normal_rows(x.reshape(batch, groups, -1)).reshape(x.shape)
    shape = (channels, *[1] * len(rest))
    return y * weight.reshape(shape) + bias.reshape(shape)


@af.op("prediction, target, weight -> loss")
def weighted_huber(prediction, target, weight, *, delta: float = 1.0):
    error = abs(prediction - target)
    return weight * af.where(error <= delta, 0.5 * error**2, delta * (error - 0.5 * delta))


@af.numpy_op("x[*, D] -> y[*, D]", gradient=lambda dy: suffix_sums(dy))
def prefix_sums(x, y):
    np.cumsum(x, axis=-1, out=y)


@af.numpy_op(lambda x: x, gradient=lambda dy: prefix_sums(dy))
def suffix_sums(x, y):
    np.cumsum(x[..., ::-1], axis=-1, out=y[..., ::-1])
