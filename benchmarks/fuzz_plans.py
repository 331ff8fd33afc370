"""Mutants of plan files, each in a child process: typed errors or results, and never a signal.

    python benchmarks/fuzz_plans.py [--count 100000] [--first 0] [--plans gpt,mlp,...] [--workers 2]
        [--sanitize] [--numpy] [--show 5]

Five small plans (`fuzzing.subjects`) are compiled; every mutant (`fuzzing.mutants`) is decoded,
proven and, if it passes, trained for a few steps in a child (`fuzzing.trial`) that serves many and
is started again when it dies. With `--sanitize` the kernels are built with gcc's AddressSanitizer.

A mutant that runs to other bits counts as another plan only where the plan it came from, with just
the mutant's fields that say what is computed (`fuzzing.trial.SAYS_WHAT`), runs to the same bits:
then all else that was changed changed nothing, and such a plan is as right as any. Prints a table,
and fails where a child died, hung, raised anything untyped, or ran to other bits for another
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PATIENCE_S = 60.0
"""A mutant that takes longer hangs; compiling its C takes a second or two."""

SERVED = 2_000
"""Mutants of one child: what is loaded natively is never unloaded."""

BAD = ("wrong", "died", "hung", "changed")


@dataclass
class Tally:
    """What became of the mutants, and the first of each kind that is a failure."""

    outcomes: Counter = field(default_factory=Counter)
    by_plan: Counter = field(default_factory=Counter)
    shown: dict[str, list[str]] = field(default_factory=dict)

    @property
    def num_lost(self) -> int:
        """Mutants that are failures of ours."""
        return sum([self.outcomes[name] for name in BAD])

    def add(self, name: str, seed: int, outcome: str, what: str, said: str) -> None:
        self.outcomes[outcome] += 1
        self.by_plan[name, outcome] += 1
        self.shown.setdefault(outcome, []).append(f"{name} {seed}: {what}\n{said}")


@dataclass(frozen=True)
class Lost:
    """A child that gave no answer: it "died" or "hung", with its code and last words."""

    outcome: str
    code: str
    errors: str


class Child:
    """A process that tries what it is asked to, started when it is needed.

    `command` is a module of ours and its arguments: it reads lines of JSON, and answers each.
    """

    def __init__(self, command: tuple[str, ...], environ: dict[str, str]) -> None:
        self._command, self._environ = command, environ
        self._process: subprocess.Popen | None = None
        self._served = 0

    def ask(self, what: object) -> Any:
        """Return the child's answer, or that it is lost."""
        if self._process is None:
            self._start()
        process = self._process
        self._served += 1
        with suppress(BrokenPipeError):  # then there is no answer either
            process.stdin.write(f"{json.dumps(what)}\n".encode())
            process.stdin.flush()
        is_there, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        line = process.stdout.readline() if is_there else b""
        if line:
            if self._served >= SERVED:
                self.end()
            return json.loads(line)
        if not is_there:
            process.send_signal(signal.SIGABRT)  # faulthandler tells where it hangs
        code = self._wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")[-3000:]
        self.end()
        lost = ("died", f"code {code}") if is_there else ("hung", f"{PATIENCE_S} s")
        return Lost(*lost, errors)

    def end(self) -> None:
        """End the process, and forget what it said."""
        if self._process is not None:
            self._wait()
            self._process.stdout.close()
            self._errors.close()
            self._process = None

    def _wait(self) -> int:
        """Let the process end; return its code."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _start(self) -> None:
        self._served = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the child
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", *self._command],
            cwd=ROOT / "benchmarks",
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )


def sanitized(environ: dict[str, str]) -> dict[str, str]:
    """Return an environment whose kernels are built with, and run under, AddressSanitizer."""
    library = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(library).is_file():
        raise SystemExit("gcc has no AddressSanitizer here")
    return environ | {
        "CC": "gcc -fsanitize=address -fno-omit-frame-pointer -g1",
        "LD_PRELOAD": str(Path(library).resolve()),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:verify_asan_link_order=0",
    }


def campaign(
    folder: Path, names: tuple[str, ...], seeds: range, workers: int, environ: dict[str, str]
) -> Tally:
    """Compile the plans into a folder, try mutants of each in turn; return what they became."""
    make = "import sys; from pathlib import Path; from fuzzing import subjects;"
    make += "subjects.save_all(Path(sys.argv[1]), tuple(sys.argv[2:]))"
    subprocess.run(
        [sys.executable, "-c", make, str(folder), *names],
        cwd=ROOT / "benchmarks", env=environ, check=True,
    )  # fmt: skip
    todo: queue.SimpleQueue = queue.SimpleQueue()
    for seed in seeds:
        todo.put((names[seed % len(names)], seed))
    tally, lock = Tally(), threading.Lock()

    def work() -> None:
        child = Child(("fuzzing.trial", str(folder)), environ)
        while True:
            try:
                name, seed = todo.get_nowait()
            except queue.Empty:
                child.end()
                return
            answer = child.ask((name, seed))
            answer = astuple(answer) if isinstance(answer, Lost) else answer
            with lock:
                tally.add(name, seed, *answer)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def environment(folder: Path, *, is_native: bool) -> dict[str, str]:
    """Return the children's environment: kernels are kept in the folder, nothing is printed."""
    return os.environ | {
        "ACTORFLOW_CACHE": str(folder / "cache"),
        "ACTORFLOW_NATIVE": str(int(is_native)),
        "ACTORFLOW_LOG": "error",
        "ACTORFLOW_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",
        "PYTHONWARNINGS": "ignore",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--plans", default="gpt,mlp,accumulate,streams,bf16,scan")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sanitize", action="store_true", help="under gcc's AddressSanitizer")
    parser.add_argument("--numpy", action="store_true", help="numpy's kernels in place of native")
    parser.add_argument("--show", type=int, default=5, help="examples of each kind of failure")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-plans-") as place:
        folder = Path(place)
        environ = environment(folder, is_native=not options.numpy)
        if options.sanitize:
            environ = sanitized(environ)
        seeds = range(options.first, options.first + options.count)
        names = tuple(options.plans.split(","))
        tally = campaign(folder, names, seeds, options.workers, environ)
    for outcome in BAD:
        for text in tally.shown.get(outcome, ())[: options.show]:
            print(f"-- {outcome}: {text}\n")
    kinds = sorted(tally.outcomes)
    print(f"| plan | {' | '.join(kinds)} |\n|---|{'--:|' * len(kinds)}")
    for name in names:
        print(f"| {name} | {' | '.join([str(tally.by_plan[name, kind]) for kind in kinds])} |")
    print(f"| all | {' | '.join([str(tally.outcomes[kind]) for kind in kinds])} |")
    print(f"{options.count} mutants in {time.monotonic() - began:.0f} s, lost: {tally.num_lost}")
    return bool(tally.num_lost)


if __name__ == "__main__":
    raise SystemExit(main())
