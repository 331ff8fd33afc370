"""The sections of the check in their order, and what a section is given and leaves behind."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CUDNN_HOLDS = "cudnn_holds"
"""What the section of kernels tells later ones: plans use cuDNN only where it was right."""

RATES = "rates"
"""What the section of rates tells: the description of the GPU, which becomes a file."""

CEILINGS = "ceilings"
"""What the section of ceilings tells: of "product" the flops, of "copy" the bytes a second."""

RIVALS = "rivals"
"""The section whose jobs torch compiles beside the sections that come before."""

_MOST_LETTERS = 600


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the check: its name, its seconds, and its module in `sections`.

    `needs_device`: it is skipped without a GPU. `is_proof`: an error or a hang of it fails the
    check, as a failed check of any section does. `is_emulated`: it can be tried on the emulated
    driver. `half`: where time on a card comes in short pieces, the first proves and the second
    measures; each has its rows by importance. `shares_card`: what it finds stays the same where
    another process uses the card and its host.
    """

    name: str
    seconds: float
    module: str
    about: str
    needs_device: bool = True
    is_proof: bool = False
    is_emulated: bool = True
    half: int = 1
    shares_card: bool = False


SECTIONS = (
    Section("versions", 5, "versions", "what is here", needs_device=False, shares_card=True),
    Section(
        "texts", 20, "texts", "all kernel texts compile, none spills", False, True, shares_card=True
    ),
    Section(
        "kernels", 45, "kernels", "each kernel against float64", is_proof=True, shares_card=True
    ),
    Section(
        "training",
        25,
        "training",
        "steps against the host, resume, graphs",
        is_proof=True,
        shares_card=True,
    ),
    Section("faults", 10, "faults", "what goes wrong is told", is_proof=True),
    Section("copies", 10, "copies", "copies beside compute"),
    Section("rates", 25, "rates", "the card's rates, on what plans launch"),
    Section("ceilings", 12, "ceilings", "the best there is, launches, graphs", half=2),
    Section("ours", 50, "ours", "GPT-2, ResNet-50, BERT, tiny, LSTM", half=2),
    Section("rivals", 62, "rivals", "the same in torch", is_emulated=False, half=2),
    Section("products", 16, "products", "launches of steps one by one", half=2),
)


class Skipped(Exception):
    """This section cannot run here; the text says why."""


@dataclass(slots=True)
class Findings:
    """What a section has found so far; every finding is on the disk before the next is made."""

    file: Path
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    checks: list[dict[str, object]] = field(default_factory=list)
    skipped: str = ""

    def metric(self, name: str, value: float) -> None:
        """Keep a number; its unit is the end of its name."""
        self.metrics[name] = float(f"{value:.5g}")
        self.write()

    def fact(self, name: str, text: object) -> None:
        """Keep a text."""
        self.facts[name] = str(text)
        self.write()

    def check(self, name: str, is_ok: bool, value: object = "", limit: object = "") -> None:
        """Keep whether something holds, what was seen and what was allowed."""
        row = {"name": name, "ok": bool(is_ok), "value": _short(value), "limit": _short(limit)}
        self.checks.append(row)
        self.write()

    def within(self, name: str, value: float, limit: float) -> None:
        """Check that a number is finite and at most a limit."""
        self.check(name, value <= limit, f"{value:.3g}", f"{limit:.3g}")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Let an error in here be a failed check, after which the section goes on."""
        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {error}")

    def write(self) -> None:
        """Put everything in the place of what was written before, at once."""
        report = {
            "metrics": self.metrics,
            "facts": self.facts,
            "checks": self.checks,
            "skipped": self.skipped,
        }
        replace_text(self.file, json.dumps(report))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."


def replace_text(file: Path, text: str) -> None:
    """Put a file in the place of another, at once."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a section runs. `shared` is a folder of all sections of a run.

    `ends` is when it will be killed, on the monotonic clock of the machine.
    """

    name: str
    shared: Path
    is_emulated: bool
    ends: float = math.inf

    @property
    def left_s(self) -> float:
        """How long it may go on."""
        return self.ends - time.monotonic()

    def tell(self, what: str, value: object) -> None:
        """Leave a value to later sections."""
        replace_text(self.shared / f"{what}.json", json.dumps(value))

    def told(self, what: str) -> object | None:
        """Return what an earlier section left, if it did."""
        try:
            return json.loads((self.shared / f"{what}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None


def find_section(name: str, sections: Sequence[Section]) -> Section:
    """Return the section of a name. Raises LookupError."""
    for section in sections:
        if section.name == name:
            return section
    raise LookupError(f"there is no section {name!r}: {', '.join([s.name for s in sections])}")
