"""What this process keeps in memory and does not need: given back to the system.

Loading a library runs the initialisers of all its parts, and making primitives asks many of them.
Around each page that is touched the system maps 64 KiB, or 2 MiB where the file is cached so. Of
oneDNN's 42 MiB of code 24 are resident once it is loaded, and 29 when the primitives of a network
are made. Its steps run code that it generated elsewhere, and few pages of these.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

_MAPS = Path("/proc/self/maps")


def release_code(function: int) -> None:
    """Unmap the code of the library that a function is in; what runs again is mapped again.

    These pages are never written, so the file has them as they were. Does nothing where the system
    does not tell what is mapped.
    """
    madvise = _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    place = code_around(function)
    if madvise is not None and hasattr(mmap, "MADV_DONTNEED") and place is not None:
        madvise(place[0], place[1] - place[0], mmap.MADV_DONTNEED)


def refuse_huge_pages(begin: int, end: int) -> None:
    """Have the pages from one address to another come one by one, as they are touched.

    Else one that is touched beside these would bring 2 MiB, of which most are never used.
    """
    madvise = _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and hasattr(mmap, "MADV_NOHUGEPAGE") and begin < end:
        madvise(begin, end - begin, mmap.MADV_NOHUGEPAGE)


def release_freed() -> None:
    """Give back what was freed and malloc keeps; the C library of some systems cannot."""
    trim = _function("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


def code_around(function: int) -> tuple[int, int] | None:
    """Return where the file of a function's code is mapped around it, half-open.

    None for what is of no file, or can be written: the file does not have it as it is.
    """
    try:
        rows = [line.split() for line in _MAPS.read_text().splitlines()]
    except OSError:
        return None
    for place, access, _, _, inode, *_ in rows:
        begin, end = [int(bound, 16) for bound in place.split("-")]
        if begin <= function < end:
            return (begin, end) if access == "r-xp" and inode != "0" else None
    return None


@cache
def _function(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a function of the C library; None where it has none of this name."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        return None
    function.argtypes = types
    return cast("Callable[..., int]", function)
