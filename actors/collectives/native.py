"""The C half of a transport: its structures as ctypes sees them, and its functions, built once."""

from __future__ import annotations

import ctypes
from pathlib import Path

from actors.fork_lock import forkable_lock
from actors.kernels.native.runtime import text_of
from actors.kernels.native.toolchain import Toolchain
from compiler.types import DType

DTYPES = (
    DType.FLOAT64,
    DType.FLOAT32,
    DType.FLOAT16,
    DType.BFLOAT16,
    DType.INT64,
    DType.INT32,
    DType.INT16,
    DType.INT8,
    DType.UINT64,
    DType.UINT32,
    DType.UINT16,
    DType.UINT8,
    DType.BOOL,
)
"""What tensors that meet may have, in the order of meet.c."""

REDUCTIONS = ("sum", "max", "min")
"""Likewise."""

ALL_REDUCE, REDUCE_SCATTER, MOVE, TRANSFER = range(4)
DONE, GIVEN_UP, LATE, GONE, ELSEWHERE, OTHER_FIRING = range(6)
MAX_RANKS = 256

SOURCE = Path(__file__).with_name("meet.c")
_libraries: dict[str, ctypes.CDLL] = {}
_lock = forkable_lock()


class CameTo(ctypes.Structure):
    """What a rank arrives for."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("digest", "firing", "row")]


class Line(ctypes.Structure):
    """What a rank says of itself in a lane: two lines of 64 bytes."""

    _fields_ = [
        ("arrivals", ctypes.c_uint32),
        ("_apart", ctypes.c_uint8 * 60),
        ("arrived", ctypes.c_uint64),
        ("came_to", CameTo * 2),
        ("_end", ctypes.c_uint8 * 8),
    ]


class GroupState(ctypes.Structure):
    """The ranks that meet in a lane, as one of them sees them."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("num_ranks", "own", "deadline_ns", "staging_bytes")],
        *[(name, ctypes.c_uint64) for name in ("num_arrivals", "num_blind", "next_look")],
        *[(name, ctypes.c_void_p) for name in ("lines", "staging", "processes")],
    ]


class ByteBlocks(ctypes.Structure):
    """Blocks of bytes in two arrays, in steps: see `collective`."""

    _fields_ = [
        ("extents", ctypes.c_int64 * 3),
        ("from_strides", ctypes.c_int64 * 3),
        ("to_strides", ctypes.c_int64 * 3),
        *[(name, ctypes.c_int64) for name in ("from_offset", "to_offset", "run_bytes")],
    ]


class MeetingState(ctypes.Structure):
    """One bound launch of a collective."""

    _fields_ = [
        ("group", ctypes.c_void_p),
        ("digest", ctypes.c_uint64),
        ("firings", ctypes.c_void_p),
        *[
            (name, ctypes.c_int64)
            for name in (
                "op", "dtype", "by", "itemsize", "num_elements", "is_aside", "input_bytes", "row",
            )
        ],
        *[
            (name, ctypes.c_void_p)
            for name in ("input", "output", "inputs_of", "outputs_of", "regions")
        ],
    ]  # fmt: skip


def library(toolchain: Toolchain) -> ctypes.CDLL:
    """Return the functions of meet.c. Raises CompilerError."""
    with _lock:  # ranks may be threads of one process
        found = _libraries.get(toolchain.fingerprint)
        if found is None:
            found = toolchain.library(text_of(SOURCE))
            found.af_meet.argtypes = (ctypes.c_void_p,)
            found.af_meet.restype = ctypes.c_int32
            found.af_give_up.argtypes = (ctypes.c_void_p,)
            found.af_give_up.restype = None
            found.af_mark.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
            found.af_mark.restype = ctypes.c_uint32
            _libraries[toolchain.fingerprint] = found
        return found


def addresses(values: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Return an array of pointers, to be kept alive as long as C has its address."""
    return (ctypes.c_void_p * max(1, len(values)))(*values)
