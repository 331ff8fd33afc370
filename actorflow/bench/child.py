"""One engine with one row in a process of its own, and the lines to talk to it.

The process says nothing unless it is asked, and answers every line with one line, see
`benchmarks/engines/serve.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from actorflow.bench.engines import EngineError

_LAST_LINES = 3
_WAIT_S = 10.0
_USER, _SYSTEM = 11, 12
"""Ticks in user and kernel mode, counted after the name of the process: proc(5)."""


class Child:
    """A started engine. Leaving it as a context ends the process, whatever it is doing."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._began = time.perf_counter()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                text=True,
                encoding="utf-8",
                start_new_session=True,  # ^C is for us alone
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"{name} does not start: {error}") from error
        self._input = cast("IO[str]", self._process.stdin)
        self._output = cast("IO[str]", self._process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the process; a second call does nothing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output, self._log):
            with contextlib.suppress(BrokenPipeError):  # a line that was never read
                pipe.close()

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._began

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Send one line and return the answer. Raises EngineError with the engine's own message."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last line is to be read
            self._input.write(json.dumps({"do": verb} | arguments) + "\n")
            self._input.flush()
        line = self._output.readline()
        if not line:
            raise EngineError(f"{self.name} ended without an answer to {verb!r}: {self._ending()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise EngineError(
                f"{self.name} answered {verb!r} with no JSON: {line.strip()[:200]!r}"
            ) from None
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return dict(answer)

    def cpu_s(self) -> float:
        """Return the processor time used so far; 0 where the system does not tell."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")

    def _ending(self) -> str:
        try:
            code: int | None = self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            code = None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        said = " / ".join(lines[-_LAST_LINES:]) or "it said nothing"
        return f"exit code {code}; {said}"
