"""Convolutions of cuDNN on the host, in float32: one product for each element of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from actors.device.emulated.products import Floats
from actors.kernels.cuda.cudnn_records import CONV, CONV_INPUT_GRAD, ConvCall, CudnnTensor


def computed(call: ConvCall, given: dict[str, Floats]) -> tuple[Floats, ...]:
    """Return the result of a call."""
    image, weight, y = call.roles
    whole = np.zeros((*_grouped(image, call)[:3], *_spans(call)), np.float32)
    inside: Any = (..., *[slice(p, p + n) for p, n in _places(call)])
    by_group = np.zeros((call.groups, y.shape[1] // call.groups, *weight.shape[1:]), np.float32)
    rows = np.zeros(_grouped(y, call), np.float32)
    for target, tensor in ((whole[inside], image), (by_group, weight), (rows, y)):
        if tensor.name in given:
            target[...] = given[tensor.name].reshape(target.shape)
    for tap, seen in _taps(call):
        if call.names == CONV:
            rows += np.einsum("ngc...,goc->ngo...", whole[seen], by_group[tap])
        elif call.names == CONV_INPUT_GRAD:
            whole[seen] += np.einsum("ngo...,goc->ngc...", rows, by_group[tap])
        else:
            part = whole[seen]
            flat = [a.reshape(*a.shape[:3], -1) for a in (part, rows)]
            by_group[tap] = np.einsum("ngct,ngot->goc", *flat)
    made = {image.name: whole[inside], weight.name: by_group, y.name: rows}
    result = call.tensors[-1]
    return (made[result.name].reshape(result.shape),)


def _grouped(tensor: CudnnTensor, call: ConvCall) -> tuple[int, ...]:
    count, channels, *extents = tensor.shape
    return (count, call.groups, channels // call.groups, *extents)


def _spans(call: ConvCall) -> list[int]:
    """Return the extents of the image with its zeros, and what no window sees."""
    return [n + 2 * p for n, p in zip(call.roles[0].shape[2:], call.padding, strict=True)]


def _places(call: ConvCall) -> Iterator[tuple[int, int]]:
    """Yield where the image begins in that, and its extent."""
    return zip(call.padding, call.roles[0].shape[2:], strict=True)


def _taps(call: ConvCall) -> Iterator[tuple[Any, Any]]:
    """Yield the index of each element of the kernel, and of what all windows see there."""
    _, weight, y = call.roles
    for tap in np.ndindex(*weight.shape[2:]):
        seen = [
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, n, s in zip(tap, call.dilation, y.shape[2:], call.strides, strict=True)
        ]
        yield (..., *tap), (..., *seen)
