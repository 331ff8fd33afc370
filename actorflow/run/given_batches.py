"""Whether all ranks are given the same batches: a digest of them, told along with each step.

Each rank takes its rows of a batch that it was given whole, and drops the others. So data that is
sharded by rank, as other systems want it, would train on half of it without a word. Nothing that a
source says of itself shows that; what it gives does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash

_SAMPLE_BYTES = 1 << 16
"""Of an array that are read for its digest: some microseconds; of a longer one every n-th element.
"""
_FIRST_STEPS, _EVERY = 8, 16
"""Steps of a run whose batches are told, and of those after them every n-th."""
_BITS = (1 << 62) - 1


class GivenBatches:
    """Tells the digest of the batches of a step; belongs to the thread that fetches them.

    Args:
        tell: called with a step, its digest, and the user's line that reads it.
        line: that line.
        first_step: the step before the first one.
        is_every: whether all steps are told, as those that the user makes one by one.
    """

    def __init__(
        self,
        tell: Callable[[int, int, str], object],
        line: str,
        first_step: int,
        *,
        is_every: bool = False,
    ) -> None:
        self._tell, self._line = tell, line
        self._first_step, self._is_every = first_step, is_every
        self._digest = 0

    def see(self, step: int, batch: Mapping[str, Any], *, is_last: bool) -> None:
        """Take a batch of a step, of which it may be the last."""
        if self._is_every or step - self._first_step <= _FIRST_STEPS or step % _EVERY == 0:
            self._digest = digest_of(batch, self._digest)
            if is_last:
                self._tell(step, self._digest & _BITS, self._line)
        if is_last:
            self._digest = 0


def digest_of(batch: Mapping[str, Any], seed: int = 0) -> int:
    """Return a hash of 64 bits of a batch's arrays: their names, types, and a sample of each.

    Of an array above 64 KiB that is every n-th element along its longest axes, so that neither its
    layout in memory nor its size matters.
    """
    hasher = xxhash.xxh3_64(seed=seed)
    for name in sorted(batch):
        array = batch[name]
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
            hasher.update(_sample(array).reshape(-1).view(np.uint8).data)
    return int(hasher.intdigest())


def _sample(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    strides = [1] * array.ndim
    shape, num_bytes = list(array.shape), array.nbytes
    while num_bytes > _SAMPLE_BYTES:
        axis = max(range(len(shape)), key=shape.__getitem__)
        if shape[axis] < 2:
            break  # elements that are larger than the sample
        strides[axis] *= 2
        shape[axis] = -(-shape[axis] // 2)
        num_bytes = array.dtype.itemsize * int(np.prod(shape))
    return np.ascontiguousarray(array[tuple([slice(None, None, n) for n in strides])])
