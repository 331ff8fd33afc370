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
    """Return x with `value` around it; less than none of it cuts x off."""
    ends = [*zip((0, 0, *low), (0, 0, *high), strict=True)]
    padded = np.pad(x, [(max(a, 0), max(b, 0)) for a, b in ends], constant_values=value)
    return padded[cuts(ends)]


def cuts(ends):
    return tuple([slice(max(-a, 0), -max(-b, 0) or None) for a, b in ends])


def onto(shape, low, high):
    """Return zeros of a shape, and a view of those that windows see, with all around them."""
    ends = [*zip((0, 0, *low), (0, 0, *high), strict=True)]
    pads = [(max(a, 0), max(b, 0)) for a, b in ends]
    whole = np.zeros([n + a + b for n, (a, b) in zip(shape, pads, strict=True)])
    inner = tuple([slice(a, a + n) for n, (a, _) in zip(shape, pads, strict=True)])
    return whole[inner], whole[cuts(ends)]


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
    dx, seen = onto((len(dy), w.shape[1] * groups, *spatial), low, high)
    for to, part, weight in by_groups(groups, (seen, 1), (dy, 1), (w, 0)):
        _, windows = windows_in(to, w.shape[2:], strides, dilation)
        for place, window in windows:
            window += np.tensordot(part[place], weight, 1)
    return dx


def conv_weight_grad(x, dy, strides, low, high, dilation, groups, kernel):
    dw = np.zeros((dy.shape[1], x.shape[1] // groups, *kernel))
    padded = wide(x, low, high)
    for to, part, slopes in by_groups(groups, (dw, 0), (padded, 1), (dy, 1)):
        _, windows = windows_in(part, kernel, strides, dilation)
        for place, window in windows:
            to += np.tensordot(slopes[place], window, ((0,), (0,)))
    return dw


def max_pool(x, kernel, strides, low, high, dilation):
    """A NaN is the largest, and what lies outside is none; the first tap of equal ones wins."""
    padded, inside = wide(x, low, high), wide(np.ones(x.shape), low, high)
    counts, windows = windows_in(padded, kernel, strides, dilation)
    insides = windows_in(inside, kernel, strides, dilation)[1]
    none = int(np.prod(kernel))
    y = np.full((*x.shape[:2], *counts), -np.inf)
    taps = np.full(y.shape, none, np.uint8)
    for (place, window), (_, is_in) in zip(windows, insides, strict=True):
        for number, tap in enumerate(np.ndindex(*kernel)):
            value, best = window[(..., *tap)], y[place]
            is_better = (value > best) | np.isnan(value) | (taps[place] == none)
            is_better = is_better & (is_in[(..., *tap)] > 0)
            y[place] = np.where(is_better, value, best)
            taps[place] = np.where(is_better, number, taps[place])
    return y, taps


def max_pool_grad(dy, taps, kernel, strides, low, high, dilation, spatial):
    dx, seen = onto((*dy.shape[:2], *spatial), low, high)
    for place, window in windows_in(seen, kernel, strides, dilation)[1]:
        for number, tap in enumerate(np.ndindex(*kernel)):
            window[(..., *tap)] += np.where(taps[place] == number, dy[place], 0)
    return dx


def max_pool_pick(x, taps, kernel, strides, low, high, dilation):
    y = np.zeros(taps.shape)
    for place, window in windows_in(wide(x, low, high), kernel, strides, dilation)[1]:
        for number, tap in enumerate(np.ndindex(*kernel)):
            y[place] = np.where(taps[place] == number, window[(..., *tap)], y[place])
    return y
