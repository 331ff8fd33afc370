"""Fused attention of cuDNN on the host, in float32.

What the library does with NaN in a key that no query sees is not known here; in a product of
numpy's, 0 * NaN is NaN.
"""

from __future__ import annotations

import numpy as np

from actors.device.emulated.products import Floats
from actors.kernels.cuda.cudnn_records import SdpaCall


def computed(sdpa: SdpaCall, given: dict[str, Floats]) -> tuple[Floats, ...]:
    """Return the results of attention, or of its gradient."""
    return _gradient(sdpa, given) if sdpa.is_backward else _attention(sdpa, given)


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
