"""Break the runtime one place at a time, and see whether its tests notice.

    python -m actors.proof.mutate [FILE ...] [--function NAME] [--every N] [--first K]
        [--limit SECONDS]    with files among machine, columns, ending, admission, in_flight,
        dispatch, worker, loop, executor, gate, order, clocks, rounds, conflicts; default: all

Every mutant (`actors.proof.mutants`) of a file runs against the tests of that file, in a process of
its own, until one fails. What no test notices survives: it wants a test, or an argument why it
changes nothing that counts (`actors/proof/equivalent_mutants.txt`, a line of file and mutant over
an indented reason). A mutant that hangs is noticed, too. Exits 1 when one survives without an
argument. Needs the tests, so it runs from a checkout.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from actors.proof.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
ARGUED = Path(__file__).with_name("equivalent_mutants.txt")


@dataclass(frozen=True, slots=True)
class Subject:
    """A module and the tests that have to notice its faults, the quick ones first."""

    module: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Return where the module's text is."""
        return ROOT / (self.module.replace(".", "/") + ".py")


_THREADS = (
    "test_dispatch.py", "test_loop.py", "test_worker.py", "test_visit.py", "test_give_up.py",
    "test_statistics.py", "test_in_flight.py", "test_admission.py",
)  # fmt: skip
_MACHINE = (
    "test_machine.py", "test_story.py",
    "proof/test_soak.py::test_every_order_of_events_gives_the_same_run_and"
    "_brings_every_slot_home[0]", "proof/test_state_space.py",
)  # fmt: skip
_CLOCKS = ("test_rounds.py", "test_clocks.py")
_ORDER = "device/plans/test_order.py"
_DEVICE = ("device/test_executor.py", "device/test_executor_mutants.py")

SUBJECTS = {
    "machine": Subject("actors.machine", _MACHINE),
    "columns": Subject("actors.columns", _MACHINE),
    "ending": Subject("actors.ending", _MACHINE),
    "admission": Subject("actors.admission", ("test_admission.py", "test_dispatch.py")),
    "in_flight": Subject("actors.in_flight", ("test_in_flight.py", "test_watchdog.py")),
    "dispatch": Subject("actors.dispatch", _THREADS),
    "worker": Subject("actors.worker", _THREADS),
    "loop": Subject("actors.loop", _THREADS),
    "executor": Subject("actors.device.executor", _DEVICE),
    "gate": Subject("actors.device.gate", _DEVICE),
    "order": Subject("actors.device.order", (_ORDER,)),
    "clocks": Subject("actors.clocks", _CLOCKS),
    "rounds": Subject(
        "actors.rounds",
        (*_CLOCKS, f"{_ORDER}::test_a_long_period_on_a_device_is_checked_to_its_end"),
    ),
    "conflicts": Subject(
        "actors.conflicts",
        ("test_race_scale.py", *_CLOCKS, "test_race.py", "test_race_oracle.py"),
    ),
}  # fmt: skip


_PRELOADED = (
    "numpy", "pytest", "compiler.plan", "actors.kernels.native.runtime",
    "actors.story", "actors.proof.scenario", "actors.timeline", "actors.failure",
)  # fmt: skip


class _Mutated(MetaPathFinder, Loader):
    """Imports one module from a text of its own."""

    def __init__(self, subject: Subject, source: str) -> None:
        self._subject = subject
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._subject.module:
            return None
        return spec_from_loader(fullname, self, origin=str(self._subject.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._subject.path)
        exec(compile(self._source, str(self._subject.path), "exec"), module.__dict__)


def is_noticed(subject: Subject, source: str, limit_s: float) -> bool:
    """Return whether a test fails with this text of the module, or runs longer than the limit."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os._exit(_run_tests(subject, source))
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _run_tests(subject: Subject, source: str) -> int:
    """Run the tests in this process, up to the first that fails, and return pytest's exit code."""
    import pytest

    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(ROOT)
    sys.meta_path.insert(0, _Mutated(subject, source))
    tests = [f"tests/actors/{name}" for name in subject.tests]
    options = ["-q", "-x", "--assert=plain", "--tb=no"]
    options += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    return int(pytest.main([*options, *tests]))


def _preload() -> None:
    """Import what every child needs and no subject is part of; a child begins where this ends."""
    for name in _PRELOADED:
        import_module(name)
    loaded = [s.module for s in SUBJECTS.values() if s.module in sys.modules]
    if loaded:
        raise RuntimeError(f"{loaded} would run without their mutants: they are loaded already")


def argued(text: str) -> dict[str, str]:
    """Return the reasons by "file: mutant" of the list of mutants that change nothing."""
    reasons: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            reasons[name] = f"{reasons[name]} {line.strip()}".strip()
        else:
            name = line.strip()
            reasons[name] = ""
    return reasons


def survivors(
    subject: Subject, mutants: Iterable[Mutant], limit_s: float
) -> Iterable[tuple[Mutant, bool]]:
    """Yield every mutant, and whether it survives. Raises RuntimeError if the tests fail anyway."""
    text = subject.path.read_text()
    if is_noticed(subject, text, limit_s):
        raise RuntimeError(
            f"without any mutant the tests of {subject.module} fail, or take more than {limit_s} s"
        )
    for mutant in mutants:
        yield mutant, not is_noticed(subject, mutant.source, limit_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 when a mutant survives that nobody argued away."""
    parser = argparse.ArgumentParser(prog="python -m actors.proof.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", help=f"of {', '.join(SUBJECTS)} (default all)")
    parser.add_argument("--function", help="only functions whose name ends so")
    parser.add_argument("--every", type=int, default=1, help="take every N-th mutant")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one mutant")
    options = parser.parse_args(arguments)
    _preload()
    reasons = argued(ARGUED.read_text())
    is_clean = True
    for name in options.files or SUBJECTS:
        subject = SUBJECTS[name]
        mutants = [
            mutant
            for mutant in mutants_of(subject.path.read_text())
            if mutant.function.endswith(options.function or "")
        ][options.first :: options.every]
        began, num_argued, left = time.monotonic(), 0, 0
        for mutant, is_alive in survivors(subject, mutants, options.limit):
            if not is_alive:
                continue
            is_argued = f"{name}: {mutant.key}" in reasons
            num_argued += is_argued
            left += not is_argued
            if not is_argued:
                where = f"{subject.path.relative_to(ROOT)}:{mutant.line}"
                print(f"{where} survives\n{name}: {mutant.key}", flush=True)
        is_clean = is_clean and not left
        print(
            f"{name}: {len(mutants)} mutants, {len(mutants) - num_argued - left} noticed,"
            f" {num_argued} argued away, {left} survive; {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return not is_clean


if __name__ == "__main__":
    sys.exit(main())
