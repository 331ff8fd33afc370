"""Fused attention of the library on the host: numpy computes what a record of a call says.

Where cuDNN's frontend is installed the record is what its own graph says, read back: that can be
made without a GPU. What the library does with NaN in a key that no query sees is not known here; in
a product of numpy's, 0 * NaN is NaN.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from actors.device.cuda import cudnn
from actors.device.emulated.library_call import LibraryOperand
from actors.device.emulated.products import Floats, array_at, store, widened
from actors.kernels.cuda.sdpa import SdpaCall

_ALIGNMENT = 16


def described(sdpa: SdpaCall) -> SdpaCall:
    """Return a call as the library's graph says it; as it is where there is no library."""
    library = _library()
    return sdpa if library is None else cudnn.read_back(str(library.describe(sdpa)))


@functools.cache
def _library() -> cudnn.Cudnn | None:
    return cudnn.Cudnn() if cudnn.is_installed() else None


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A call that was checked, with the workspace that it may use."""

    sdpa: SdpaCall
    workspace_bytes: int

    def operands(self, addresses: tuple[int, ...]) -> tuple[LibraryOperand, ...]:
        """Return what a call with these addresses reads and writes."""
        return tuple(
            [
                LibraryOperand(tensor.name, address, tensor.span_bytes, _ALIGNMENT)
                for tensor, address in zip(self.sdpa.tensors, addresses, strict=True)
            ]
        )

    def lies_over_itself(self, addresses: tuple[int, ...]) -> bool:
        """Whether a result lies over an operand."""
        operands = self.operands(addresses)
        count = len(operands) - self.sdpa.num_results
        pairs = itertools.product(operands[:count], operands[count:])
        return any([one.lies_over(other) for one, other in pairs])


def run(sdpa: SdpaCall, addresses: tuple[int, ...]) -> None:
    """Compute attention, or its gradient, on tensors at these addresses."""
    held = {
        tensor.name: (tensor.dtype, array_at(address, tensor.dtype, tensor.shape, tensor.strides))
        for tensor, address in zip(sdpa.tensors, addresses, strict=True)
    }
    count = len(sdpa.tensors) - sdpa.num_results
    given = {name: widened(held[name][1], held[name][0]) for name in sdpa.names[:count]}
    with np.errstate(invalid="ignore", over="ignore"):
        made = _gradient(sdpa, given) if sdpa.is_backward else _attention(sdpa, given)
    for name, values in zip(sdpa.names[count:], made, strict=True):
        store(held[name][1], values, held[name][0])


def _attention(sdpa: SdpaCall, given: dict[str, Floats]) -> tuple[Floats, Floats]:
    scores = _scores(sdpa, given)
    most = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - most)
    sums = exponentials.sum(-1, keepdims=True)
    return exponentials / sums @ given["v"], most + np.log(sums)


def _gradient(sdpa: SdpaCall, given: dict[str, Floats]) -> tuple[Floats, Floats, Floats]:
    p = np.exp(_scores(sdpa, given) - given["lse"])
    dy, y = given["dy"], given["y"]
    slopes = dy @ given["v"].swapaxes(-1, -2) - (dy * y).sum(-1, keepdims=True)
    ds = sdpa.scale * p * slopes
    return ds @ given["k"], ds.swapaxes(-1, -2) @ given["q"], p.swapaxes(-1, -2) @ dy


def _scores(sdpa: SdpaCall, given: dict[str, Floats]) -> Floats:
    """Return scaled scores; those that are not seen are minus infinity."""
    scores: Floats = np.float32(sdpa.scale) * (given["q"] @ given["k"].swapaxes(-1, -2))
    if sdpa.causal:
        rows, columns = scores.shape[-2:]
        scores[..., ~np.tri(rows, columns, columns - rows, dtype=bool)] = -np.inf
    return scores
