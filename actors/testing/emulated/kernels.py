"""Kernel texts for the C compiler: built into libraries, and run by `fibers.c`.

Texts that a process has not met yet are built together, by one start of the compiler; everything
that a text defines at file scope begins with its own name, so that many stand in one file. Barriers
are told apart by their lines in a text.

State of the module, and why: what is loaded stays for the life of the process, as launches hold
addresses of it, and one kernel runs at a time, under Python's lock.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.kernels.cuda.calls import KernelText
from actors.kernels.cuda.kernel import Gpu
from actors.kernels.library.toolchain import Toolchain
from actors.machine.errors import forkable_lock
from compiler.contract.errors import ActorflowError, InternalError

FLAGS = (
    "-O1",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-Werror=implicit-function-declaration",
    "-ftree-vrp",  # without it the next finds nothing
    "-Werror=array-bounds",
    "-Werror=uninitialized",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
"""Compiling costs more than running here: a text takes some 40 ms at any level, -O3 a second."""

_HERE = Path(__file__).parent
_CUDA = _HERE.parents[1] / "kernels" / "cuda"
_BOUND = re.compile(r"AF_KERNEL_(?:TWO_)?UP_TO\((\d+)\)\s+(\w+)\(")
_INCLUDE = re.compile(r'^#include "(device\.cuh|emulated\.h)"$', re.MULTILINE)
_MAX_THREADS, _WARP = 1024, 32
_MOST_WORDS = 32_764 // 8
"""Of arguments, from Volta on (CUDA Programming Guide, on parameters of kernels)."""
_TROUBLE = (
    "",
    "thread {thread} ended while others of its block wait at line {other_line}",
    "thread {thread} waits at line {line} while others of its block wait at line {other_line}",
    "threads meet, and the text says that they do not (has_exchanges)",
    "it has more than 48 KiB of shared memory",
    "a thread wrote outside an array of shared memory",
    "thread {thread} exhausted its stack",
    "there is no memory for stacks",
    "thread {thread} reads or writes bytes at an address that is no multiple of their number",
    "thread {thread} takes other bytes of shared memory than its launch asks for",
)


class EmulationError(ActorflowError):
    """A kernel did what would hang on a GPU, or mean nothing."""


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel that can be run: where its code is, and what its text says of it."""

    name: str
    address: int
    num_words: int
    max_threads: int
    has_exchanges: bool


class _Trouble(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_int64),
        ("thread", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("other_line", ctypes.c_int32),
    )


@dataclass(slots=True)
class _KernelState:
    fibers: ctypes.PyDLL | None = None
    built: dict[str, BuiltKernel] = field(default_factory=dict)
    libraries: list[ctypes.PyDLL] = field(default_factory=list)


_state = _KernelState()
_lock = forkable_lock()


def load(texts: Sequence[KernelText], toolchain: Toolchain) -> None:
    """Build and load the kernels of some texts that are not there yet.

    Raises CompilerError where the compiler refuses.
    """
    with _lock:
        unmet = [text for text in texts if text.kernels[0] not in _state.built]
        missing = list({text.kernels[0]: text for text in unmet}.values())
        if not missing:
            return
        library = _loaded(_file_of(missing), replace(toolchain, flags=FLAGS))
        library.af_enter(ctypes.c_void_p(_fibers(toolchain).af_machine_address()))
        for text in missing:
            bounds = {name: int(bound) for bound, name in _BOUND.findall(text.text)}
            for name in text.kernels:
                _state.built[name] = BuiltKernel(
                    name,
                    ctypes.cast(library[f"af_call_{name}"], ctypes.c_void_p).value or 0,
                    ctypes.c_int64.in_dll(library, f"af_words_of_{name}").value,
                    bounds.get(name, _MAX_THREADS),
                    text.has_exchanges,
                )


def built(name: str) -> BuiltKernel:
    """Return a kernel that was loaded. Raises KeyError."""
    return _state.built[name]


def run(
    kernel: BuiltKernel, grid: tuple[int, int], shared_bytes: int, words: int, seed: int
) -> None:
    """Run a kernel on the argument block at an address; the order follows from the seed.

    `grid` is blocks and threads.

    Raises EmulationError where threads do not meet as they must.
    """
    trouble = _Trouble()
    if _state.fibers is None:
        raise InternalError("a kernel runs before any was loaded")
    code = _state.fibers.af_launch(
        kernel.address,
        words,
        *grid,
        shared_bytes,
        kernel.has_exchanges,
        seed,
        ctypes.byref(trouble),
    )
    if code:
        place = {name: getattr(trouble, name) for name in ("thread", "line", "other_line")}
        raise EmulationError(
            f"kernel {kernel.name!r}, block {trouble.block}: {_TROUBLE[code].format(**place)}"
        )


def _file_of(texts: Sequence[KernelText]) -> str:
    parts = ["#define AF_EMULATED", _CUDA.joinpath("device.cuh").read_text(encoding="utf-8")]
    for text in texts:
        entries = [f"AF_ENTRY({name})" for name in text.kernels]
        parts += [f'#line 1 "{text.kernels[0]}.cu"', text.text, *entries]
    return _with_header("\n".join(parts)) + "\n"


def _with_header(text: str) -> str:
    """Put emulated.h where it is included first; the words of `device.cuh` stand before all."""
    header = _HERE.joinpath("emulated.h").read_text(encoding="utf-8")
    included = _INCLUDE.sub(lambda _: header, text, count=1)
    return _INCLUDE.sub("", included)


def _fibers(toolchain: Toolchain) -> ctypes.PyDLL:
    if _state.fibers is None:
        text = _with_header(_HERE.joinpath("fibers.c").read_text(encoding="utf-8"))
        flags = tuple(["-O2" if flag == "-O1" else flag for flag in FLAGS])
        fibers = _loaded(text, replace(toolchain, flags=(*flags, "-U_FORTIFY_SOURCE")))
        fibers.af_machine_address.restype = ctypes.c_void_p
        fibers.af_launch.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_uint64,
            ctypes.c_void_p,
        )
        _state.fibers = fibers
    return _state.fibers


def _loaded(text: str, toolchain: Toolchain) -> ctypes.PyDLL:
    """Return a library whose functions keep Python's lock: one kernel runs at a time."""
    library = toolchain.library(text)
    _state.libraries.append(ctypes.PyDLL(None, handle=library._handle))
    return _state.libraries[-1]


def wrong_launch(
    kernel: BuiltKernel,
    gpu: Gpu,
    grid: tuple[int, int],
    shared_bytes: int,
    num_words: int,
) -> str:
    """Return why no GPU would launch a kernel so; `grid` is blocks and threads. "" if one would."""
    num_blocks, num_threads = grid
    if not 0 < num_threads <= kernel.max_threads or num_threads % _WARP:
        return f"{num_threads} threads are no whole warps, or more than {kernel.max_threads}"
    if not 0 < num_blocks < 1 << 31:
        return f"{num_blocks} blocks"
    if shared_bytes > gpu.shared_bytes:
        return f"{shared_bytes} bytes of shared memory, a block has {gpu.shared_bytes}"
    if num_words < kernel.num_words:
        return f"{num_words} words of arguments, it reads {kernel.num_words}"
    if kernel.num_words > _MOST_WORDS:
        return f"it reads {kernel.num_words} words of arguments, a launch has {_MOST_WORDS}"
    return ""
