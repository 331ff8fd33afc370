"""The native half of the host: a C compiler, one pool of threads, and the symbols of C texts.

`enable` is called by `actorflow.environment.native`, with what the settings say, before anything
is compiled; until then, and where there is no C compiler, native kernels take no call and numpy's
run. What is loaded stays for the life of the process: launches hold addresses of it.

State of the module, and why: a pool of threads belongs to the process, because two would fight for
its cores (two alternating pools cost a factor of 2 to 3), and a library once loaded cannot be
unloaded under the launches that point into it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from actors.kernels.common.files import (
    KERNEL_BYTES,
    DamagedFile,
    distrust_of_file,
    mark_used,
    prune_in_turn,
    read_checksummed,
    write_checksummed,
)
from actors.machine.errors import forkable_lock
from compiler.contract.errors import ActorflowError, DeviceError

# A shared library is found again by the hash of all that decides its bytes: the text, the flags,
# the compiler's version, and the features of the processor. So a cache that was made on another
# machine is never run: `-march=native` code for a foreign processor would end the process with
# SIGILL. A file that is damaged (`read_checksummed`), or that others may write
# (`distrust_of_file`), is built anew, and a line says so.

FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-Werror=implicit-function-declaration",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
"""No -ffast-math: it would lose NaN, infinities and the sign of zero.

No contraction: a compiler knows no border between ops. Where max is of the rounded product x * c,
fma(x, c, -max) is not 0 but up to half a last place of it, whose exponential overflows. Polynomials
and sums of products inside one op say their own af_fmaf or af_add_scaled.
"""

_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120
_MAX_ERRORS = 3
_SEALED = "name and content"
"""What a seal covers: files of another way to seal have other names, and are none of ours."""


def _silent(text: str) -> None:
    """Say nothing."""


class CompilerError(ActorflowError):
    """The C compiler does not take a text, or does not run, or what it built cannot be loaded."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C compiler: how it is called, what it calls itself, and the processor it compiles for.

    `command` is its path and the words that always follow: ("/usr/bin/ccache", "gcc"). `folder`
    keeps the built libraries; None builds them anew in every process. `report` is told of files
    there that are not used.
    """

    command: tuple[str, ...]
    version: str
    processor: str
    folder: Path | None
    report: Callable[[str], None] = _silent
    flags: tuple[str, ...] = FLAGS

    @property
    def fingerprint(self) -> str:
        """Everything besides the text that decides what a library does, and how it is kept."""
        text = "\n".join([self.version, self.processor, *self.command[1:], *self.flags, _SEALED])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def library(self, text: str) -> ctypes.CDLL:
        """Return the library of a C text, built now unless the folder has it.

        Raises CompilerError when the compiler refuses, or when nothing can be written or loaded
        anywhere. A folder that cannot be written, or a file in it that cannot be loaded (no program
        may run from there, say), costs a build and no more.
        """
        name = self._name_of(text)
        if self.folder is not None:
            path = self.folder / name
            if self._is_usable(path):
                with contextlib.suppress(OSError):  # of another system, say: build it again
                    return ctypes.CDLL(str(path))
        try:
            with tempfile.TemporaryDirectory(prefix="actorflow-") as place:
                library_path = self._build(text, Path(place))
                final_path = _keep(library_path, self.folder, name)
                # Loaded from where it stays, so that the next process maps the same pages.
                if final_path is not None:
                    with contextlib.suppress(OSError):
                        return ctypes.CDLL(str(final_path))
                # The mapping outlives the temporary folder, which is removed when this returns.
                return ctypes.CDLL(str(library_path))
        except OSError as error:
            raise CompilerError(
                f"cannot build or load native kernels: {error}; set TMPDIR to a folder that can be"
                " written and from which programs may run"
            ) from None

    def keep(self, texts: Sequence[str], num_threads: int) -> None:
        """Build the libraries that the folder lacks, several at once; load none.

        What is refused here is refused again, and said, by whoever asks for the library.
        """
        if self.folder is None:
            return
        folder = self.folder
        missing = [text for text in texts if not self._is_usable(folder / self._name_of(text))]
        # A single one is built by whoever loads it next: a pool would only add its start.
        if len(missing) > 1:
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(self._try_to_keep, missing))

    def _try_to_keep(self, text: str) -> None:
        with (
            contextlib.suppress(CompilerError, OSError),
            tempfile.TemporaryDirectory(prefix="actorflow-") as place,
        ):
            _keep(self._build(text, Path(place)), self.folder, self._name_of(text))

    def _is_usable(self, kept: Path) -> bool:
        """Whether a file is there, is ours, and ends as it was written under its name."""
        try:
            why = distrust_of_file(kept)
            if why is None:
                read_checksummed(kept)
                mark_used(kept)
                return True
        except DamagedFile:
            why = f"{kept} is damaged"
        except OSError:
            return False
        self.report(f"{why}: it is not loaded, and built again")
        with contextlib.suppress(OSError):
            kept.unlink()
        return False

    def _name_of(self, text: str) -> str:
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{self.fingerprint}-{digest}.so"

    def _build(self, text: str, place: Path) -> Path:
        source, library = place / "kernels.c", place / "kernels.so"
        called = shlex.join(self.command)
        source.write_text(text, encoding="utf-8")
        command = [*self.command, *self.flags, str(source), "-o", str(library), "-lm", "-lpthread"]
        try:
            run = subprocess.run(
                command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=None
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CompilerError(f"the C compiler {called} does not run: {error}") from None
        if run.returncode or not library.exists():
            # The name of the temporary folder differs each time and says nothing to the user.
            log = run.stderr.decode("utf-8", "replace").replace(f"{place}{os.sep}", "")
            raise CompilerError(
                f"the C compiler {called} ended with status {run.returncode}: {_errors_in(log)}"
            )
        return library


def find_toolchain(
    environ: Mapping[str, str], folder: Path | None, report: Callable[[str], None] = _silent
) -> Toolchain | None:
    """Return the compiler that CC names, else the first of cc, gcc and clang; None without one.

    CC is read as a shell reads it: "gcc -m64" and "ccache gcc" are words. `folder` is made, for
    this user alone, when the first library is kept; whether it may be trusted is the caller's to
    ask (`files.distrust_of_folder`). `report` is told of files in it that are not used.
    """
    try:
        named = tuple(shlex.split(environ.get("CC", "")))
    except ValueError:  # a quotation without an end names no compiler
        return None
    for name, *others in (named,) if named else [(name,) for name in _COMPILERS]:
        path = shutil.which(name, path=environ.get("PATH"))
        if path is None:
            continue
        command = (path, *others)
        version = _version(command)
        if version is not None:
            return Toolchain(command, version, processor(), folder, report)
    return None


def processor() -> str:
    """Return the model and features of this machine's processor, as far as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    value_of: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in fields:
            # The first processor's: the file repeats these lines for each of them.
            value_of.setdefault(key.strip(), value.strip())
    return "\n".join([platform.machine(), *[value_of.get(key, "") for key in fields]])


def _errors_in(said: str) -> str:
    """Return the first errors of what a compiler said, on one line."""
    lines = said.splitlines()
    errors = [line for line in lines if "error" in line] or lines
    return "; ".join(errors[:_MAX_ERRORS]) or "it says nothing"


def _version(command: tuple[str, ...]) -> str | None:
    try:
        run = subprocess.run(
            [*command, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True
        )
    except OSError as error:
        # Not to be taken for a missing compiler, which would silently turn native kernels off.
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise DeviceError(
                f"no file descriptor is left to ask the C compiler {command[0]}: {error.strerror};"
                " raise the limit ('ulimit -n')"
            ) from error
        return None
    except subprocess.SubprocessError:
        return None
    return run.stdout.decode("utf-8", "replace").strip()


def _keep(built: Path, folder: Path | None, name: str) -> Path | None:
    """Move a library to the folder; None where that cannot be."""
    if folder is None:
        return None
    try:
        write_checksummed(folder / name, built.read_bytes())
    except OSError:
        return None
    prune_in_turn(folder / name, KERNEL_BYTES)
    return folder / name


_HERE = Path(__file__).parents[1] / "native"
"""Where the C files and headers of ours lie."""

_INCLUDE = re.compile(r'^#include "([a-z_]+\.h)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CFunction:
    """A launch in C: the text of `int32_t NAME(void *arguments)`, static functions included.

    The text may use runtime.h, sums.h and af_math.h; every name at file scope begins with
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


_state = _RuntimeState()
_asking = threading.local()
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
    """Return how many threads a call may use; 1 while nothing is turned on."""
    return _state.num_threads if is_enabled() and not getattr(_asking, "is_alone", False) else 1


@contextmanager
def as_one_thread() -> Iterator[None]:
    """Make `num_threads` 1 for this thread, so that a kernel asks for its least workspace."""
    _asking.is_alone = True
    try:
        yield
    finally:
        _asking.is_alone = False


def fingerprint() -> str:
    """Return what native kernels depend on besides their text; "" while nothing is turned on."""
    if _state.toolchain is None or not is_enabled():
        return ""
    return f"native-{_state.toolchain.fingerprint} threads-{_state.num_threads}"


def prepare(functions: Iterable[CFunction]) -> None:
    """Build all functions that are not there yet, in one library: one start of the compiler.

    Raises CompilerError when some are refused; it says what each of them computes.
    `is_broken` is true of them from then on, and the others are built.
    """
    with _lock:
        missing = {f.name: f for f in functions if f.name not in _state.homes}
        if not missing:
            return
        # Sorted: the library's name is a hash of this text, whatever order plans ask in.
        batch = [missing[name] for name in sorted(missing)]
        try:
            _load(batch)
        except CompilerError:
            # One bad text refuses the file: each is tried alone, so that the others still serve.
            refused = [function for function in batch if not _is_loaded_alone(function)]
            if not refused:
                return
            others = [function.about or function.name for function in refused[1:]]
            more = f" (and refuses {len(others)} more: {'; '.join(others)})" if others else ""
            raise CompilerError(_state.broken[refused[0].name] + more) from None


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
        text = _text_of(file)
        try:
            _state.files[file] = _linked(text)
        except CompilerError as error:
            # Not broken for good where nothing was tried: native kernels may be turned on later.
            if is_enabled():
                _state.broken[file] = f"{file}: {error}"
            raise CompilerError(f"{file}: {error}") from None


def build_ahead(files: Iterable[str], functions: Iterable[CFunction]) -> None:
    """Build what is missing of files and functions several at once; nothing is loaded.

    `load_file` and `prepare` find it built then, and say what the compiler refused.
    """
    with _lock:
        texts = [_text_of(file) for file in files if file not in _state.files]
        missing = {f.name: f for f in functions if f.name not in _state.homes}
        if missing:
            texts.append(_text_with([missing[name] for name in sorted(missing)]))
        if texts and _state.toolchain is not None:
            _state.toolchain.keep(texts, max(2, _state.num_threads))


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
    _state.num_threads = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _load(functions: list[CFunction]) -> None:
    library = _linked(_text_with(functions))
    for function in functions:
        _state.homes[function.name] = library


def _text_with(functions: list[CFunction]) -> str:
    """Return one file of functions. What they are about is for people: C sees none of its words."""
    includes = '#include "runtime.h"\n#include "sums.h"\n#include "af_math.h"\n'
    return _with_includes(includes + "\n".join([f.text for f in functions]))


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
    # Each library has its own copy of the header; all are handed the one pool of the process.
    library.af_bind_runtime.argtypes = (ctypes.c_void_p,)
    library.af_bind_runtime(_state.core.af_parallel_address())
    # Kept for the life of the process: launches hold addresses in it.
    _state.libraries.append(library)
    return library


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
