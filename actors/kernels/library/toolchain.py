"""A C compiler, the shared libraries that it builds from texts, and the folder that keeps them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from actors.kernels.common.files import (
    KERNEL_BYTES,
    DamagedFile,
    distrust_of_file,
    mark_used,
    prune_in_turn,
    read_checksummed,
    write_checksummed,
)
from compiler.contract.errors import ActorflowError, DeviceError

# A shared library is found again by the hash of all that decides its bytes: the text, the flags,
# the compiler's version, and the features of the processor. So a cache that was made on another
# machine is never run: `-march=native` code for a foreign processor would end the process with
# SIGILL. A file that is damaged (`read_checksummed`), or that others may write
# (`distrust_of_file`), is built anew, and a line says so.

FLAGS = (
    "-O2",
    "-ftree-loop-vectorize",
    "-fvect-cost-model=dynamic",
    "-fno-tree-slp-vectorize",
    "-fno-tree-vrp",
    "-fno-thread-jumps",
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
"""No -O3: it takes up to three times as long for a few per cent. What has to be unrolled says so in
its text, and where elements are of two types there are two loops. What is left out of -O2 is a
tenth of its time. -O1, and -fno-expensive-optimizations, would leave out vzeroupper, without which
code of other libraries may be slow after ours.

No -ffast-math: it would lose NaN, infinities and the sign of zero.

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


builds = SimpleNamespace(num_files=0, num_built=0)
"""Files that are being built several at once, 0 otherwise, and how many of them are. For people."""


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
        library = self.kept_library(name)
        if library is not None:
            return library
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

    def kept_library(self, name: str) -> ctypes.CDLL | None:
        """Return a library of the folder by its name; None where none is that can be loaded."""
        if self.folder is not None and self._content_of(self.folder / name) is not None:
            with contextlib.suppress(OSError):  # of another system, say: build it again
                return ctypes.CDLL(str(self.folder / name))
        return None

    def home_of(self, text: str) -> str | None:
        """Return the name of the kept library that has the functions of a text, among others.

        None where there is no such library: of the text alone, or one that `note_home` noted.
        """
        if self.folder is None:
            return None
        name = self._name_of(text)
        if (self.folder / name).exists():
            return name
        home = self._content_of(self.folder / _home_file(name))
        return None if home is None else home.decode("ascii", "replace")

    def note_home(self, text: str, members: Iterable[str]) -> None:
        """Note that the library of a text has the functions of all `members`, which are texts."""
        if self.folder is None:
            return
        for member in members:
            path = self.folder / _home_file(self._name_of(member))
            # Where that cannot be, the next process that lacks one of them builds it again.
            with contextlib.suppress(OSError):
                write_checksummed(path, self._name_of(text).encode())
                prune_in_turn(path, KERNEL_BYTES)

    def keep(self, texts: Sequence[str], num_threads: int) -> None:
        """Build the libraries that the folder lacks, several at once and in this order; load none.

        What is refused here is refused again, and said, by whoever asks for the library.
        """
        if self.folder is None:
            return
        folder = self.folder
        missing = [text for text in texts if self._content_of(folder / self._name_of(text)) is None]
        # A single one is built by whoever loads it next: a pool would only add its start.
        if len(missing) > 1:
            builds.num_files, builds.num_built = len(missing), 0
            try:
                with ThreadPoolExecutor(num_threads) as pool:
                    for builds.num_built, _ in enumerate(pool.map(self.try_to_keep, missing), 1):
                        pass
            finally:
                builds.num_files = 0

    def try_to_keep(self, text: str) -> None:
        """Build and keep the library of a text, or do neither: `library` then says why."""
        with (
            contextlib.suppress(CompilerError, OSError),
            tempfile.TemporaryDirectory(prefix="actorflow-") as place,
        ):
            _keep(self._build(text, Path(place)), self.folder, self._name_of(text))

    def _content_of(self, kept: Path) -> bytes | None:
        """Return a file that is there, is ours, and ends as it was written under its name."""
        try:
            why = distrust_of_file(kept)
            if why is None:
                content = read_checksummed(kept)
                mark_used(kept)
                return content
        except DamagedFile:
            why = f"{kept} is damaged"
        except OSError:
            return None
        self.report(f"{why}: it is not loaded, and built again")
        with contextlib.suppress(OSError):
            kept.unlink()
        return None

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


def _home_file(name: str) -> str:
    """Return the name of the file that says where a library's functions are as well."""
    return f"{name.removesuffix('.so')}.home"


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
