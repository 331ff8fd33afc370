"""What a plan may ask of cuDNN: the kernels of a version, by the whole library or by a part of it.

NVIDIA's package nvidia-cudnn-jit-cu13 (74 MB) holds the engines that compile kernels on the GPU's
own machine; nvidia-cudnn-cu13 (517 MB) has compiled ones besides. Which of them is meant decides
what is planned, so it stands in a plan's fingerprint: plans need no GPU, and no library either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CUDNN = "cudnn."
"""How the names of kernels begin that need the package of cuDNN."""

ORDERED_GRADIENT = f"{CUDNN}ordered_attention_grad"

OLDEST = (9, 19)
"""The oldest with which kernels ran right on a card. It computes all gradients of attention that
are not ordered; since 9.0 the library can repeat those on Hopper."""

OLDEST_ORDERED = (9, 25)
"""What lets blocks add to dq in order, on Hopper, in scratch of its size."""

_WORD = re.compile(r"(?:^| )cudnn(-jit)?-(\d+)\.(\d+)(?: |$)")


@dataclass(frozen=True, slots=True)
class CudnnLibrary:
    """A version, of which kernels may be planned; `is_jit`: without kernels that were compiled."""

    version: tuple[int, int] = OLDEST_ORDERED
    is_jit: bool = False

    def __str__(self) -> str:
        kind = "-jit" * self.is_jit
        return f"cudnn{kind}-{self.version[0]}.{self.version[1]}"

    @property
    def level(self) -> CudnnLibrary:
        """Return what plans tell apart: the oldest library that has the same kernels."""
        version = OLDEST_ORDERED if self.version >= OLDEST_ORDERED else OLDEST
        return CudnnLibrary(version, self.is_jit)


def oldest_for(kernels: tuple[str, ...]) -> tuple[int, int]:
    """Return the oldest version that has all of some kernels, by their names in a plan."""
    return OLDEST_ORDERED if ORDERED_GRADIENT in kernels else OLDEST


def library_of(target: str) -> CudnnLibrary | None:
    """Return the library in a plan's fingerprint, None for a plan without cuDNN."""
    found = _WORD.search(target)
    if found is None:
        return None
    return CudnnLibrary((int(found[2]), int(found[3])), bool(found[1]))
