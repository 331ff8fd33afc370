"""NVRTC by ctypes: kernel texts to cubins, and what a cubin costs; no GPU and no driver is asked.

`find_library` also finds NVIDIA's other libraries.

A cubin is kept by all that decides its bytes: the text behind its header, the architecture, the
compiler's version and its options. There is no fast math: denormals stay, division and roots are
rounded, NaN and infinities are what IEEE says. A product and a sum are not contracted to one
rounding (-fmad is off): the compiler knows no border between ops, and the difference of what one op
rounded and another did not is not 0 where it should be. expf and the like are the library's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from actors.kernels.common.files import (
    KERNEL_BYTES,
    DamagedFile,
    distrust_of_file,
    distrust_of_folder,
    mark_used,
    prune_in_turn,
    read_checksummed,
    write_checksummed,
)
from actors.kernels.cuda.calls import KernelText
from compiler.contract.errors import CompileError, DeviceError

# NVIDIA's libraries lie in packages of Python, in a toolkit, or where the loader looks. The loader
# itself finds none of the packages, and a library that looks for another by name looks there, or in
# the folder of packages of its own environment. One that is loaded is found by its name, wherever
# it lies: so whoever needs several loads them in order.

_OF_PACKAGES = ("cu13/lib", "cudnn/lib", "cudnn_jit/lib")
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
_USUAL_TOOLKIT = "/usr/local/cuda"


def find_library(name: str) -> str:
    """Return the path of a library ("libcublasLt.so.13"); its name for the loader, if not here."""
    return str(next(iter(places_of(name)), name))


def places_of(name: str) -> list[Path]:
    """Return every file of a library that is known of, those of packages first."""
    return [folder / name for folder in _folders() if (folder / name).exists()]


def _folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    # One for each environment that has some of the packages.
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for folder in _OF_PACKAGES:
            yield Path(root) / folder
    for toolkit in (*[os.environ.get(name) for name in _TOOLKITS], _USUAL_TOOLKIT):
        if toolkit:
            yield Path(toolkit) / "lib64"


OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v", "--fmad=false")
_LIBRARY = "libnvrtc.so.13"
_HEADER = Path(__file__).parent / "device.cuh"
_MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """What one kernel has of a multiprocessor, as the assembler says it.

    Spills and the stack are memory of a thread: for registers, and for arrays that have no constant
    index.
    """

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class _Built:
    cubin: bytes
    log: str


def is_here() -> bool:
    """Whether NVRTC can be loaded."""
    try:
        loaded_library()
    except DeviceError:
        return False
    return True


def version() -> tuple[int, int]:
    """Return the version of NVRTC. Raises DeviceError where it is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(loaded_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def cubin(text: KernelText, arch: str, folder: Path | None) -> bytes:
    """Return the machine code of a text for an architecture ("sm_90a"), from any thread.

    `folder` keeps it; None compiles anew. A folder that cannot be read or written, or that others
    may write, costs the time and no more. Raises CompileError with what the compiler says, and
    DeviceError where there is no compiler.
    """
    path = None if folder is None else folder / _name_of(text, arch)
    if path is not None and distrust_of_folder(path.parent) is None:
        # What is damaged or another's is made anew; nothing in it is worth an error.
        with contextlib.suppress(OSError, DamagedFile):
            if distrust_of_file(path) is None:
                code = read_checksummed(path)
                mark_used(path)
                return code
    return _kept(text, arch, folder).cubin


def _kept(text: KernelText, arch: str, folder: Path | None) -> _Built:
    """Build a text, and keep what comes of it where that can be."""
    built = _build(text, arch)
    if folder is not None:
        with contextlib.suppress(OSError):
            write_checksummed(folder / _name_of(text, arch), built.cubin)
            prune_in_turn(folder / _name_of(text, arch), KERNEL_BYTES)
    return built


def cubins(
    texts: Sequence[KernelText], arch: str, folder: Path | None, num_threads: int
) -> tuple[bytes, ...]:
    """Return the machine code of several texts, compiled by as many threads. Raises as `cubin`."""
    # ctypes releases the interpreter lock in NVRTC's calls, so texts compile side by side.
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        return tuple(pool.map(lambda text: cubin(text, arch, folder), texts))


def usage(text: KernelText, arch: str, folder: Path | None = None) -> dict[str, KernelUsage]:
    """Return what each kernel of a text uses; it is compiled anew, and kept. Raises as `cubin`."""
    log = _kept(text, arch, folder).log
    usages = {}
    # What ptxas -v says, one part per kernel; before the first there are notes on the module.
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = part.split("'")[1]
        spilled = sum([_number(rf"(\d+) bytes spill {kind}", part) for kind in ("stores", "loads")])
        stack = _number(r"(\d+) bytes stack frame", part)
        shared = _number(r"(\d+) bytes smem", part)
        usages[name] = KernelUsage(_number(r"Used (\d+) registers", part), spilled, stack, shared)
    return usages


def _number(pattern: str, log: str) -> int:
    match = re.search(pattern, log)
    return int(match.group(1)) if match else 0


def _name_of(text: KernelText, arch: str) -> str:
    major, minor = version()
    deciding = "\n".join([*OPTIONS, arch, f"{major}.{minor}", _header(), text.text])
    return f"{hashlib.blake2b(deciding.encode(), digest_size=16).hexdigest()}.cubin"


@functools.cache
def _header() -> str:
    return _HEADER.read_text(encoding="utf-8")


def _build(text: KernelText, arch: str) -> _Built:
    nvrtc, program = loaded_library(), ctypes.c_void_p()
    # One text instead of an include, so that NVRTC looks for no file; #line keeps messages right.
    source = f'#line 1 "device.cuh"\n{_header()}#line 1 "kernels.cu"\n{text.text}'
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    _check(code, "nvrtcCreateProgram")
    try:
        options = [f"-arch={arch}".encode(), *[option.encode() for option in OPTIONS]]
        c_options = (ctypes.c_char_p * len(options))(*options)
        status = nvrtc.nvrtcCompileProgram(program, len(options), c_options)
        log = _text(program, "ProgramLog").decode("utf-8", "replace")
        if status:
            raise CompileError(
                f"NVRTC {'.'.join(map(str, version()))} refuses kernels for {arch}"
                f" ({text.about or ', '.join(text.kernels)}): {_errors_in(log)}"
            )
        return _Built(_text(program, "CUBIN", is_log=False), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str, *, is_log: bool = True) -> bytes:
    """Return the log or the code of a program; a log ends with a zero."""
    nvrtc, size = loaded_library(), ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"{what}Size")
    buffer = ctypes.create_string_buffer(max(1, size.value))
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.value if is_log else buffer.raw[: size.value]


def _errors_in(log: str) -> str:
    lines = [
        line for line in log.splitlines() if line.strip() and not line.startswith("ptxas info")
    ]
    return "\n".join(lines[:_MOST_LINES]) or "it does not say why"


def _check(status: int, call: str) -> None:
    if status:
        text = loaded_library().nvrtcGetErrorString(status).decode()
        raise CompileError(f"{call} of NVRTC failed with code {status} ({text})")


@functools.cache
def loaded_library() -> ctypes.CDLL:
    """Return NVRTC, of the installed package or as the loader finds it."""
    tried = []
    for path in (*places_of(_LIBRARY), Path(_LIBRARY)):
        # It asks for its builtins by name while it compiles, and 13.0 does not look beside itself.
        builtins = sorted(path.parent.glob("libnvrtc-builtins.so.*")) if path.is_absolute() else []
        try:
            for beside in builtins:
                ctypes.CDLL(str(beside))
            library = ctypes.CDLL(str(path))
        except OSError as error:
            tried.append(str(error))
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        library.nvrtcDestroyProgram.argtypes = [ctypes.c_void_p]
        for name in ("nvrtcGetProgramLog", "nvrtcGetCUBIN"):
            getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_char_p]
            getattr(library, f"{name}Size").argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.nvrtcCompileProgram.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        return library
    raise DeviceError(
        f"cannot load {_LIBRARY}, the compiler of CUDA kernels ({'; '.join(tried)}); it comes with"
        " pip install 'actorflow[cuda]'"
    )
