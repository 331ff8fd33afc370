"""The C compiler of this machine, and the shared libraries that it built, kept by content.

A library is found again by the hash of all that decides its bytes: the text, the flags, the
compiler's version, and the features of the processor. So a cache that was made on another machine
is never run: `-march=native` code for a foreign processor would end the process with SIGILL. A file
that is damaged (`sealed`), or that others may write (`trust`), is built anew, and a line says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from actors.kernels.native.sealed import DamagedFile, read_sealed, replace_sealed
from actors.kernels.native.trust import distrust_of_file
from compiler.errors import ActorflowError

FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Werror=implicit-function-declaration",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
"""No -ffast-math: it would lose NaN, infinities and the sign of zero."""

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
            kept = self.folder / name
            if self._is_usable(kept):
                with contextlib.suppress(OSError):  # of another system, say: build it again
                    return ctypes.CDLL(str(kept))
        try:
            with tempfile.TemporaryDirectory(prefix="actorflow-") as place:
                built = self._build(text, Path(place))
                kept_at = _keep(built, self.folder, name)
                if kept_at is not None:
                    with contextlib.suppress(OSError):
                        return ctypes.CDLL(str(kept_at))
                return ctypes.CDLL(str(built))
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
                read_sealed(kept)
                return True
        except DamagedFile:
            why = f"{kept} is damaged"
        except OSError:
            return False
        self.report(f"{why}: it is not loaded, but built anew")
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
            ended = subprocess.run(
                command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=None
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CompilerError(f"the C compiler {called} does not run: {error}") from None
        if ended.returncode or not library.exists():
            said = ended.stderr.decode("utf-8", "replace").replace(f"{place}{os.sep}", "")
            raise CompilerError(
                f"the C compiler {called} ended with status {ended.returncode}: {_errors_in(said)}"
            )
        return library


def find_toolchain(
    environ: Mapping[str, str], folder: Path | None, report: Callable[[str], None] = _silent
) -> Toolchain | None:
    """Return the compiler that CC names, else the first of cc, gcc and clang; None without one.

    CC is read as a shell reads it: "gcc -m64" and "ccache gcc" are words. `folder` is made, for
    this user alone, when the first library is kept; whether it may be trusted is the caller's to
    ask (`trust.distrust_of_folder`). `report` is told of files in it that are not used.
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
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in wanted:
            found.setdefault(key.strip(), value.strip())
    return "\n".join([platform.machine(), *[found.get(key, "") for key in wanted]])


def _errors_in(said: str) -> str:
    """Return the first errors of what a compiler said, on one line."""
    lines = said.splitlines()
    errors = [line for line in lines if "error" in line] or lines
    return "; ".join(errors[:_MAX_ERRORS]) or "it says nothing"


def _version(command: tuple[str, ...]) -> str | None:
    try:
        ended = subprocess.run(
            [*command, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.decode("utf-8", "replace").strip()


def _keep(built: Path, folder: Path | None, name: str) -> Path | None:
    """Move a library to the folder; None where that cannot be."""
    if folder is None:
        return None
    try:
        replace_sealed(folder / name, built.read_bytes())
    except OSError:
        return None
    return folder / name
