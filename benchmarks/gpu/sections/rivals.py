"""The same jobs in torch at its best, after their losses were found to be ours.

torch has its batches on the GPU before the clock starts; ours are copied in. Each rival has a
process of its own. Those of a wave compile at the same time, and are then timed one by one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from time import monotonic

from rows.all_rows import find_row

from gpu.section import Findings, Place, Skipped

SCRIPT = Path(__file__).resolve().parents[1] / "rival.py"
EAGER, CAPTURED, COMPILED = "eager", "reduce-overhead", "default"
WAVES = (
    # What matters most, in this order; they lie on a card of 80 GB beside one another.
    (
        ("gpt2-b64", COMPILED),
        ("gpt2-b1", CAPTURED),
        ("resnet-50-b64", "eager channels_last"),
        ("bert-base", EAGER),
        ("gpt2-b8", EAGER),
        ("tiny", CAPTURED),
        ("lstm", EAGER),
    ),
    (
        ("resnet-50-b64", "default channels_last"),
        ("bert-base", COMPILED),
        ("gpt2-b8", COMPILED),
        ("gpt2-b1", COMPILED),
        ("lstm", COMPILED),
    ),
    (
        ("gpt2-b64", EAGER),
        ("gpt2-b1", EAGER),
        ("tiny", EAGER),
    ),
)
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
WAVE_S, TIMED_S, MOST_TIMED_S = 34.0, 3.0, 8.0
"""What compiling takes that is waited for; what a rival takes to be timed, and what it is given."""

FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "2"}
_KILLED_S = 5.0
_WORD = "rival: "


@dataclass(slots=True)
class Rival:
    """A process that computes a row, and the lines that it says; `reader` takes them."""

    name: str
    variant: str
    process: subprocess.Popen[str]
    reader: threading.Thread | None = None
    lines: Queue[dict[str, object] | None] = field(default_factory=Queue)
    tail: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """How its metrics begin."""
        return "_".join([self.name, *[w for w in self.variant.split() if w != EAGER]])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def read(self) -> None:
        """Take lines until there are no more; None is the last."""
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith(_WORD):
                    self.lines.put(json.loads(line[len(_WORD) :]))
                self.tail = [*self.tail[-5:], line.strip()]
        self.lines.put(None)

    def said(self, until: float) -> dict[str, object] | None:
        """Return the next line; None where none comes in time, or it has ended."""
        with suppress(Empty):
            words = self.lines.get(timeout=max(until - monotonic(), 0.01))
            if words is None:
                self.lines.put(None)  # whoever asks again
            return words
        return None

    def end(self) -> None:
        """Kill the process and take what it said last."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.reader.join(_KILLED_S)  # a process that it started may hold the line


@dataclass(frozen=True, slots=True)
class Timing:
    """Which rivals are timed in which order, by which script, and what that may take."""

    waves: tuple[tuple[tuple[str, str], ...], ...] = WAVES
    script: Path = SCRIPT
    wave_s: float = WAVE_S
    timed_s: float = TIMED_S


_USUAL = Timing()


def run(found: Findings, place: Place, timing: Timing = _USUAL) -> None:
    try:
        found.fact("torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError as error:
        raise Skipped("torch is not here") from error
    waves = timing.waves
    for number, wave in enumerate(waves):
        # A later wave comes where it can end: its members compile as long as these.
        if number and place.left_s < timing.wave_s + timing.timed_s * len(wave):
            left = [f"{name} {variant}" for later in waves[number:] for name, variant in later]
            found.fact("no time was left for", ", ".join(left))
            return
        with _started(wave, timing.script) as rivals:
            _wave(found, place, rivals, timing)


def _wave(found: Findings, place: Place, rivals: list[Rival], timing: Timing) -> None:
    """Time those that are ready in time, while the others stand still, and then these."""
    until = monotonic() + min(timing.wave_s, max(place.left_s - timing.timed_s * len(rivals), 1.0))
    ready = [(rival, rival.said(until)) for rival in rivals]
    late = [rival for rival, first in ready if first is None]
    for rival in late:
        rival.signal(signal.SIGSTOP)
    for rival, first in ready:
        if first is not None:
            _measure(found, place, rival, first)
    for rival in late:
        rival.signal(signal.SIGCONT)
    for rival in late:
        until = monotonic() + min(timing.wave_s, place.left_s - timing.timed_s)
        first = rival.said(until)
        if first is not None:
            _measure(found, place, rival, first)
            continue
        rival.end()
        words = " / ".join(rival.tail)[-300:]
        found.fact(f"{rival.name} {rival.variant}", f"not ready in time: {words}")


@contextmanager
def _started(wave: tuple[tuple[str, str], ...], script: Path) -> Iterator[list[Rival]]:
    rivals = []
    try:
        for name, variant in wave:
            process = subprocess.Popen(
                [sys.executable, str(script), name, variant],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True, env=os.environ | FEW_THREADS,
            )  # fmt: skip
            rivals.append(Rival(name, variant, process))
            rivals[-1].reader = threading.Thread(target=rivals[-1].read, daemon=True)
            rivals[-1].reader.start()
        yield rivals
    finally:
        for rival in rivals:
            rival.end()


def _measure(found: Findings, place: Place, rival: Rival, first: dict[str, object]) -> None:
    row, key, ours = find_row(rival.name), rival.key, place.told(f"losses-{rival.name}")
    found.fact(key, first["settings"])
    found.metric(f"{key}_first_steps_s", first["first_steps_s"])
    if ours is not None:
        limit = TOLERANCE[row.precisions[-1]]
        apart = max([abs(a - b) / abs(b) for a, b in zip(first["losses"], ours, strict=True)])
        found.within(f"{key}: losses of 5 steps by ours", apart, limit)
        if not apart <= limit:
            rival.signal(signal.SIGKILL)  # what computes otherwise is not timed
            return
    with suppress(BrokenPipeError):
        rival.process.stdin.write("go\n")
        rival.process.stdin.flush()
    timed = rival.said(min(monotonic() + MOST_TIMED_S, place.ends - 1.0))
    rival.signal(signal.SIGKILL)
    if timed is None:
        found.fact(f"{rival.name} {rival.variant}", f"not timed: {' / '.join(rival.tail)[-300:]}")
        return
    step_s, peak = timed["step_s"], timed["peak_bytes"]
    found.metric(f"{key}_{row.item}_s", row.items / step_s)
    found.metric(f"{key}_ms", 1e3 * step_s)
    if row.name == "tiny":
        found.metric(f"{key}_steps_s", 1 / step_s)
    found.metric(f"{key}_peak_gib", peak / (1 << 30))
