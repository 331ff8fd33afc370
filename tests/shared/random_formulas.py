"""What random numbers and dropout are, by numpy's own generator."""

from __future__ import annotations

import numpy as np


def random_numbers(seed, step, shape, key):
    counter, keys = np.array([0, 0, step, 0], "u8"), np.array([seed, key], "u8")
    generator = np.random.Generator(np.random.Philox(key=keys, counter=counter))
    return np.asarray(generator.random(shape, np.float32) * 2**24).astype(np.int32)


def dropout(x, seed, step, p, key):
    keys = np.array([seed, key], np.int64).view(np.uint64)
    counter = np.array([0, 0, step, 0], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=keys, counter=counter))
    return np.where(generator.random(x.shape, np.float32) >= p, x / (1 - p), 0)


def dropout_of_part(x, seed, step, first, p, key):
    places = first[..., None] + np.arange(x.shape[-1]) if first.ndim else None
    places = first + np.arange(x.size).reshape(x.shape) if places is None else places
    whole = dropout(np.ones(int(places.max()) + 1), seed, step, p, key)
    return np.where(whole[places] > 0, x / (1 - p), 0)
