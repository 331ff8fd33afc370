"""Convolutions and pools window by window, in float64 and words of this file alone."""

from __future__ import annotations

import numpy as np


def seen_windows(padded, kernel, counts, strides, dilation):
    """Yield each window's place and its elements, a view of [N, C, *kernel]."""
    for place in np.ndindex(*counts):
        ways = zip(place, kernel, strides, dilation, strict=True)
        window = [slice(t * s, t * s + (k - 1) * d + 1, d) for t, k, s, d in ways]
        yield (..., *place), padded[(..., *window)]


def windows_in(padded, kernel, strides, dilation):
    ways = zip(padded.shape[2:], kernel, strides, dilation, strict=True)
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in ways]
    return counts, seen_windows(padded, kernel, counts, strides, dilation)


def wide(x, low, high, value=0.0):
    ends = [(0, 0), (0, 0), *zip(low, high, strict=True)]
    return np.pad(x, ends, constant_values=value)


def by_groups(groups, *arrays):
    return zip(*[np.split(array, groups, axis) for array, axis in arrays], strict=True)


def conv(x, w, strides, low, high, dilation, groups):
    padded = wide(x, low, high)
    counts, _ = windows_in(padded, w.shape[2:], strides, dilation)
    y = np.zeros((len(x), len(w), *counts))
    for to, part, weight in by_groups(groups, (y, 1), (padded, 1), (w, 0)):
        _, windows = windows_in(part, w.shape[2:], strides, dilation)
        for place, window in windows:
            to[place] = np.tensordot(window, weight, (range(1, w.ndim),) * 2)
    return y


def conv_input_grad(dy, w, strides, low, high, dilation, groups, spatial):
    dx = np.zeros((len(dy), w.shape[1] * groups, *spatial))
    padded = wide(dx, low, high)
    for to, part, weight in by_groups(groups, (padded, 1), (dy, 1), (w, 0)):
        _, windows = windows_in(to, w.shape[2:], strides, dilation)
        for place, window in windows:
            window += np.tensordot(part[place], weight, 1)
    return padded[(..., *[slice(a, a + n) for a, n in zip(low, spatial, strict=True)])]


def conv_weight_grad(x, dy, strides, low, high, dilation, groups, kernel):
    dw = np.zeros((dy.shape[1], x.shape[1] // groups, *kernel))
    padded = wide(x, low, high)
    for to, part, slopes in by_groups(groups, (dw, 0), (padded, 1), (dy, 1)):
        _, windows = windows_in(part, kernel, strides, dilation)
        for place, window in windows:
            to += np.tensordot(slopes[place], window, ((0,), (0,)))
    return dw


def max_pool(x, kernel, strides, low, high, dilation):
    counts, windows = windows_in(wide(x, low, high, -np.inf), kernel, strides, dilation)
    y, taps = np.zeros((*x.shape[:2], *counts)), np.zeros((*x.shape[:2], *counts), np.uint8)
    for place, window in windows:
        flat = window.reshape(*x.shape[:2], -1)
        y[place], taps[place] = flat.max(-1), flat.argmax(-1)
    return y, taps


def max_pool_grad(dy, taps, kernel, strides, low, high, dilation, spatial):
    padded = wide(np.zeros((*dy.shape[:2], *spatial)), low, high)
    for place, window in windows_in(padded, kernel, strides, dilation)[1]:
        for number, tap in enumerate(np.ndindex(*kernel)):
            window[(..., *tap)] += np.where(taps[place] == number, dy[place], 0)
    return padded[(..., *[slice(a, a + n) for a, n in zip(low, spatial, strict=True)])]


def max_pool_pick(x, taps, kernel, strides, low, high, dilation):
    y = np.zeros(taps.shape)
    for place, window in windows_in(wide(x, low, high), kernel, strides, dilation)[1]:
        flat = window.reshape(*x.shape[:2], -1)
        y[place] = np.take_along_axis(flat, taps[place][..., None].astype(int), -1)[..., 0]
    return y
