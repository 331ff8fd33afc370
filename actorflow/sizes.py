"""Sizes as users write them: 600_000_000, "600MiB", "2 GB"."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}

_MOST = 1 << 60
"""A larger budget is a slip of the keyboard."""


def parse_bytes(size: object) -> int:
    """Return a size in bytes: an integer as it is, a string as number and unit.

    Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024); case and
    blanks do not matter. Fractions of a byte are cut off.

    Raises:
        ValueError: it is neither, not above 0, or 2^60 bytes or more; the text says what came.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"expected bytes as an integer or a string such as '600MiB', got {size!r}")
    if isinstance(size, int):
        num_bytes = size
    else:
        match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = match.group(2).upper() if match else None
        if match is None or unit not in _UNITS:
            raise ValueError(
                f"expected a number with one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, got {size!r}"
            )
        num_bytes = int(Fraction(match.group(1).replace("_", "")) * _UNITS[unit or ""])
    if not 0 < num_bytes < _MOST:
        raise ValueError(f"expected more than 0 and less than 2^60 bytes, got {size!r}")
    return num_bytes
