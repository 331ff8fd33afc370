"""The native half of the host: one pool of threads, and the symbols of C texts.

`enable` is called by `actorflow.environment.native`, with what the settings say, before anything
is compiled; until then, and where there is no C compiler, native kernels take no call and numpy's
run. What is loaded stays for the life of the process: launches hold addresses of it.

State of the module, and why: a pool of threads belongs to the process, because two would fight for
its cores (two alternating pools cost a factor of 2 to 3), and a library once loaded cannot be
unloaded under the launches that point into it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from actors.kernels.library.toolchain import CompilerError, Toolchain
from actors.machine.errors import forkable_lock

_HERE = Path(__file__).parents[1] / "native"
"""Where the C files and headers of ours lie."""

_INCLUDE = re.compile(r'^#include "([a-z_]+\.h)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CFunction:
    """A launch in C: the text of `int32_t NAME(void *arguments)`, static functions included.

    The text may use runtime.h, sums.h, af_math.h and angles.h; every name at file scope begins with
    `name`, so that the functions of a plan can stand in one file. `about` says to a person what it
    computes; it may quote a plan, which may come from anywhere, so it never reaches the compiler.
    """

    name: str
    text: str
    about: str = ""


@dataclass(slots=True)
class _RuntimeState:
    toolchain: Toolchain | None = None
    core: ctypes.CDLL | None = None
    is_on: bool = False
    num_threads: int = 1
    homes: dict[str, ctypes.CDLL] = field(default_factory=dict)
    files: dict[str, ctypes.CDLL] = field(default_factory=dict)
    libraries: list[ctypes.CDLL] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    ahead: threading.Thread | None = None


class _Asking(threading.local):
    most_threads = 1 << 30


_state = _RuntimeState()
_asking = _Asking()
_lock = forkable_lock()


def enable(toolchain: Toolchain, num_threads: int) -> None:
    """Enable native kernels with this many threads, the caller's own included.

    The pool has the most threads that were ever asked for; a later call with fewer lowers how many
    a call uses from then on. While native kernels are on, another toolchain changes nothing.

    Raises CompilerError when the compiler does not take our own runtime.
    """
    with _lock:
        if _state.core is None:
            core = toolchain.library(_text_of("runtime.c"))
            # ctypes assumes int, which would cut the address to 32 bits.
            core.af_parallel_address.restype = ctypes.c_void_p
            core.af_start.argtypes = (ctypes.c_int32,)
            _state.core = core
            _begin_ahead(toolchain)
        if not _state.is_on:
            _state.toolchain = toolchain
        # The pool never shrinks: it answers with what it has, perhaps more than is asked for now.
        _state.num_threads = int(_state.core.af_start(num_threads))
        _state.num_threads = min(_state.num_threads, num_threads)
        _state.is_on = True


def disable() -> None:
    """Disable native kernels for new calls; launches that are bound go on, and the pool stays.

    `enable` takes up the same pool again.
    """
    with _lock:
        _state.is_on = False


def is_enabled() -> bool:
    """Whether native kernels are enabled."""
    return _state.is_on


def num_threads() -> int:
    """Return how many threads a launch that is planned or bound now may use."""
    return min(pool_threads(), _asking.most_threads)


def pool_threads() -> int:
    """Return how many threads of the pool any launch may use; 1 while nothing is turned on."""
    return _state.num_threads if is_enabled() else 1


@contextmanager
def at_most_threads(count: int) -> Iterator[None]:
    """Limit `num_threads` on this thread: with 1, a kernel asks for its least workspace."""
    before = _asking.most_threads
    _asking.most_threads = min(count, before)
    try:
        yield
    finally:
        _asking.most_threads = before


def fingerprint() -> str:
    """Return what native kernels depend on besides their text; "" while nothing is turned on."""
    if _state.toolchain is None or not is_enabled():
        return ""
    return f"native-{_state.toolchain.fingerprint} threads-{num_threads()}"


def prepare(functions: Iterable[CFunction]) -> None:
    """Build all functions that are not there yet, in one library or in a few of about one size.

    Raises CompilerError when some are refused; it says what each of them computes.
    `is_broken` is true of them from then on, and the others are built.
    """
    refused: list[CFunction] = []
    with _lock:
        for unit in _units_of(_missing(functions)):
            try:
                _load(unit)
            except CompilerError:
                # One bad text refuses the file: each is tried alone, so that the others serve.
                refused += [function for function in unit if not _is_loaded_alone(function)]
        if refused:
            others = [function.about or function.name for function in refused[1:]]
            more = f" (and refuses {len(others)} more: {'; '.join(others)})" if others else ""
            raise CompilerError(_state.broken[refused[0].name] + more)


def address_of(function: CFunction, suffix: str = "") -> int:
    """Return the address of a function, built now if need be. Raises CompilerError.

    A suffix asks for another function of its text: "_rows" for NAME_rows.
    """
    if function.name not in _state.homes:
        prepare((function,))
    return _address(_state.homes[function.name], function.name + suffix)


def address_in(file: str, symbol: str) -> int:
    """Return the address of a function in a C file of ours: ("attention.c", "af_forward").

    Raises CompilerError when the compiler refuses the file.
    """
    with _lock:
        load_file(file)
        return _address(_state.files[file], symbol)


def load_file(file: str) -> None:
    """Build and load a C file of ours, unless that was done.

    Raises CompilerError when the compiler refuses it; `is_refused` is true of it from then on.
    """
    with _lock:
        if file in _state.files:
            return
        if file in _state.broken:
            raise CompilerError(_state.broken[file])
        if file == _FIRST_FILE:
            _end_ahead()
        text = _text_of(file)
        try:
            _state.files[file] = _linked(text)
        except CompilerError as error:
            # Not broken for good where nothing was tried: native kernels may be turned on later.
            if is_enabled():
                _state.broken[file] = f"{file}: {error}"
            raise CompilerError(f"{file}: {error}") from None


def build_ahead(files: Iterable[str], functions: Iterable[CFunction]) -> None:
    """Build what is missing of files and functions several at once; none of that is loaded.

    `load_file` and `prepare` find it built then, and say what the compiler refused.
    """
    with _lock:
        _end_ahead()
        own = [_text_of(file) for file in files if file not in _state.files]
        units = [_text_with(unit) for unit in _units_of(_missing(functions))]
        # The longest first, so that none is begun when all others are at their end.
        lengths = {text: len(text) * _FILE_WEIGHT for text in own} | {t: len(t) for t in units}
        if lengths and _state.toolchain is not None:
            _state.toolchain.keep(sorted(lengths, key=lambda t: -lengths[t]), _num_builders())


def is_broken(function: CFunction) -> bool:
    """Whether the compiler refused this function before."""
    return function.name in _state.broken


def is_refused(file: str) -> bool:
    """Whether the compiler refused a C file of ours before."""
    return file in _state.broken


def refusals() -> dict[str, str]:
    """Return the functions and files that the compiler refused, with its message."""
    return dict(_state.broken)


def chain_runner() -> int:
    """Return the address of `af_run_chain`. Raises RuntimeError while nothing is turned on."""
    if _state.core is None or not is_enabled():
        raise RuntimeError("native kernels are not turned on")
    return _address(_state.core, "af_run_chain")


def unique_name(prefix: str, text: str) -> str:
    """Return a C name made from the content of a text; put it where the text says NAME."""
    return f"{prefix}_{hashlib.blake2b(text.encode(), digest_size=10).hexdigest()}"


def _after_fork_in_child() -> None:
    """Forget the threads that stayed with the parent; the next `enable` starts helpers again."""
    # The pool's threads stayed with the parent: a call that waited for them would hang.
    _state.num_threads, _state.ahead = 1, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# Products are measured with one file before anything else is known of a plan. It is built while the
# process traces and plans, which takes one core; measuring waits for it, and is not disturbed.

_FIRST_FILE = "gemm.c"


def _begin_ahead(toolchain: Toolchain) -> None:
    text = _text_of(_FIRST_FILE)
    if toolchain.folder is not None and toolchain.home_of(text) is None:
        # The process waits for it at its end, so that it leaves no file behind.
        _state.ahead = threading.Thread(
            target=toolchain.try_to_keep, args=(text,), name="actorflow-build"
        )
        _state.ahead.start()


def _end_ahead() -> None:
    if _state.ahead is not None:
        _state.ahead.join()
        _state.ahead = None


# Functions are built some at a time: a start of the compiler, with our headers, takes as long as a
# short function (0.05 s). A library is named by its whole text, so it could serve only those who
# lack the same functions; therefore it is noted of each function which library has it. A plan with
# one new function builds that one alone.

_FILE_WEIGHT = 3
"""How much longer a character of a file takes than one of a function: files take 15 to 29 us for
each, the functions of a GPT 8 (gcc 12 on Zen 4)."""

_UNIT_CHARS = 24_000
"""Of text in a library, at least: some 0.2 s."""


def _missing(functions: Iterable[CFunction]) -> list[CFunction]:
    """Return the functions that must be built; those that the folder has are loaded."""
    missing = {f.name: f for f in functions if f.name not in _state.homes}
    chain, core = _state.toolchain, _state.core
    if chain is None or core is None or not is_enabled():
        return list(missing.values())
    kept: dict[str, list[str]] = {}
    for function in missing.values():
        home = chain.home_of(_text_with([function]))
        if home is not None:
            kept.setdefault(home, []).append(function.name)
    for home, names in kept.items():
        library = chain.kept_library(home)
        if library is not None:
            _bind(library, core)
            _state.homes |= dict.fromkeys(names, library)
    return [function for name, function in missing.items() if name not in _state.homes]


def _units_of(functions: list[CFunction]) -> list[list[CFunction]]:
    """Return functions by library: as many as are built at once, unless they would be small."""
    total = sum([len(function.text) for function in functions])
    count = min(_num_builders(), max(1, total // _UNIT_CHARS), len(functions))
    units: list[list[CFunction]] = [[] for _ in range(count)]
    sizes = [0] * count
    # By size and name, so that the text follows from what there is, whatever order plans ask in.
    for function in sorted(functions, key=lambda f: (-len(f.text), f.name)):
        place = sizes.index(min(sizes))
        units[place].append(function)
        sizes[place] += len(function.text)
    return units


def _num_builders() -> int:
    return max(2, _state.num_threads)


def _load(functions: list[CFunction]) -> None:
    text = _text_with(functions)
    library = _linked(text)
    for function in functions:
        _state.homes[function.name] = library
    if len(functions) > 1 and _state.toolchain is not None:
        _state.toolchain.note_home(text, [_text_with([function]) for function in functions])


def _text_with(functions: list[CFunction]) -> str:
    """Return one file of functions. What they are about is for people: C sees none of its words."""
    return _headers() + "\n".join([f.text for f in functions])


@functools.cache
def _headers() -> str:
    return _with_includes('#include "runtime.h"\n#include "sums.h"\n#include "angles.h"\n')


def _is_loaded_alone(function: CFunction) -> bool:
    """Build one function; return whether that could be, and keep why not."""
    try:
        _load([function])
    except CompilerError as error:
        _state.broken[function.name] = f"{function.about or function.name}: {error}"
        return False
    return True


def _linked(text: str) -> ctypes.CDLL:
    """Return the library of a text, bound to the pool."""
    if _state.toolchain is None or _state.core is None or not is_enabled():
        raise CompilerError("native kernels are not turned on: there is no C compiler")
    library = _state.toolchain.library(text)
    _bind(library, _state.core)
    return library


def _bind(library: ctypes.CDLL, core: ctypes.CDLL) -> None:
    """Bind a library to the pool."""
    # Each library has its own copy of the header; all are handed the one pool of the process.
    library.af_bind_runtime.argtypes = (ctypes.c_void_p,)
    library.af_bind_runtime(core.af_parallel_address())
    # Kept for the life of the process: launches hold addresses in it.
    _state.libraries.append(library)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


def _text_of(file: str) -> str:
    return text_of(_HERE / file)


def text_of(path: Path) -> str:
    """Return a C file as one text, with what it includes of our headers."""
    return _with_includes(path.read_text(encoding="utf-8"))


def _with_includes(text: str) -> str:
    """Put our headers into a text: what is built depends on one text alone."""
    seen: set[str] = set()

    def included(match: re.Match[str]) -> str:
        name = match[1]
        # A header's text once only: C would refuse its definitions a second time.
        if name in seen:
            return ""
        seen.add(name)
        return _INCLUDE.sub(included, (_HERE / name).read_text(encoding="utf-8"))

    return _INCLUDE.sub(included, text)
