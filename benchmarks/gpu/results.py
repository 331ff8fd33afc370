"""What the check found: values, JSON, Markdown, and the table that is printed last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gpu.predictions import PREDICTIONS, Prediction

SCHEMA = 1
TABLE_LINES, TABLE_WIDTH = 40, 110
_NUM_METRICS = 4


class Status(Enum):
    """How a section ended."""

    OK = "ok"
    FAIL = "fail"
    ERROR = "error"
    TIMEOUT = "timeout"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class SectionResult:
    """A section that has ended. `why` says why it was skipped, or how it failed."""

    name: str
    status: Status
    seconds: float
    is_proof: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[Mapping[str, object]] = ()
    why: str = ""
    log_tail: str = ""

    @property
    def failures(self) -> tuple[str, ...]:
        """What makes the whole check fail."""
        texts = [
            f"{self.name}: {c['name']}: {c['value']}"
            + (f", allowed {c['limit']}" if c["limit"] else "")
            for c in self.checks
            if not c["ok"]
        ]
        if self.is_proof and self.status in (Status.ERROR, Status.TIMEOUT):
            texts.append(f"{self.name}: {self.status.value}: {self.why}")
        return tuple(texts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A prediction and what was measured; None where nothing was."""

    prediction: Prediction
    measured: float | None

    @property
    def word(self) -> str:
        """Return hit, miss or nothing."""
        if self.measured is None:
            return "not measured"
        return "hit" if self.prediction.low <= self.measured <= self.prediction.high else "miss"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A whole run, finished or not. `head` says when, where and with what.

    Numbers of an emulated one are measures of nothing.
    """

    head: Mapping[str, object]
    sections: tuple[SectionResult, ...] = ()
    is_emulated: bool = False

    @property
    def failures(self) -> tuple[str, ...]:
        """What failed, of all sections."""
        return tuple([text for section in self.sections for text in section.failures])

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return every prediction with what was measured."""
        counted = () if self.is_emulated else self.sections
        values = {f"{s.name}/{n}": value for s in counted for n, value in s.metrics.items()}
        return tuple([Verdict(p, values.get(p.name)) for p in PREDICTIONS])


def as_json(result: CheckResult) -> dict[str, object]:
    """Return what is written to check.json."""
    return {
        "schema": SCHEMA,
        **result.head,
        "sections": [
            {
                "name": s.name,
                "status": s.status.value,
                "seconds": round(s.seconds, 1),
                "why": s.why,
                "metrics": dict(s.metrics),
                "facts": dict(s.facts),
                "checks": list(s.checks),
                "log_tail": s.log_tail,
            }
            for s in result.sections
        ],
        "predictions": [
            {
                "name": v.prediction.name,
                "low": v.prediction.low,
                "high": v.prediction.high,
                "why": v.prediction.why,
                "measured": v.measured,
                "verdict": v.word,
            }
            for v in result.verdicts
        ],
        "failures": list(result.failures),
    }


def markdown(result: CheckResult) -> str:
    """Return what is written to check.md: everything but the logs."""
    lines = ["# The check on a GPU", ""]
    lines += [f"- {name}: {value}" for name, value in result.head.items()]
    lines += ["", "| section | ends | s | checks |", "|---|---|--:|--:|"]
    for s in result.sections:
        good = sum([bool(c["ok"]) for c in s.checks])
        ends = s.status.value + (f": {s.why}" if s.why else "")
        lines.append(f"| {s.name} | {_cell(ends)} | {s.seconds:.1f} | {good} of {len(s.checks)} |")
    lines += [
        "",
        "## Predictions",
        "",
        "| number | expected | measured | | why |",
        "|---|--:|--:|---|---|",
    ]
    for v in result.verdicts:
        p, measured = v.prediction, "" if v.measured is None else f"{v.measured:.4g}"
        lines.append(
            f"| {p.name} | {p.low:g} to {p.high:g} | {measured} | {v.word} | {_cell(p.why)} |"
        )
    for s in result.sections:
        if s.metrics or s.facts:
            lines += ["", f"## {s.name}", "", "| | |", "|---|--:|"]
            lines += [f"| {_cell(n)} | {_cell(t)} |" for n, t in s.facts.items()]
            lines += [f"| {_cell(n)} | {value:g} |" for n, value in s.metrics.items()]
        if s.checks:
            lines += ["", "| check | holds | seen | allowed |", "|---|---|---|---|"]
            lines += [
                f"| {_cell(c['name'])} | {'yes' if c['ok'] else '**NO**'} | {_cell(c['value'])} |"
                f" {_cell(c['limit'])} |"
                for c in s.checks
            ]
    lines += ["", *[f"- FAIL {_cell(text)}" for text in result.failures]]
    lines += ["", *rows_table(result)]
    return "\n".join(lines).rstrip() + "\n"


_HEAD = (
    "row", "items/s", "ours ms", "planned/ours", "limit ms", "limit/ours", "best rival ms", "which",
    "ours/rival", "GiB ours", "GiB rival",
)  # fmt: skip


def rows_table(result: CheckResult) -> list[str]:
    """Return what was timed, a line of Markdown for each row; none where nothing was.

    `limit` is what a plan's launches take at the ceilings of the card; the last ratio is of speeds,
    above 1 where ours is the faster.
    """
    metrics = {s.name: s.metrics for s in result.sections}
    ours, rivals = metrics.get("ours", {}), metrics.get("rivals", {})
    end = "_limit_ms"
    names = [n.removesuffix(end) for n in ours if n.endswith(end)]
    lines = []
    for name in names:
        ms, limit, gib = [ours[f"{name}_{what}"] for what in ("ms", "limit_ms", "real_gib")]
        planned_ms, rate = ours[f"{name}_simulated_ms"], 1e3 * ours[f"{name}_items"] / ms
        cells = [name, f"{rate:,.0f}", f"{ms:.3f}", f"{planned_ms / ms:.2f}", f"{limit:.3f}",
                 f"{limit / ms:.2f}"]  # fmt: skip
        timed = [
            (value, key.removesuffix("_ms"))
            for key, value in rivals.items()
            if key == f"{name}_ms" or (key.startswith(f"{name}_") and key.endswith("_ms"))
        ]
        if timed:
            rival_ms, key = min(timed)
            which = key.removeprefix(name).strip("_").replace("_", " ") or "eager"
            peak = rivals.get(f"{key}_peak_gib", float("nan"))
            cells += [f"{rival_ms:.3f}", which, f"{rival_ms / ms:.2f}", f"{gib:.2f}",
                      f"{peak:.2f}"]  # fmt: skip
        else:
            cells += ["", "none timed", "", f"{gib:.2f}", ""]
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    return [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|", *lines]


def table(result: CheckResult) -> str:
    """Return at most 40 lines: sections with key numbers, predictions missed, what failed."""
    lines = [f"{'section':10s} {'ends':8s} {'s':>6s}  checks"]
    for s in result.sections:
        passed = f"{sum([bool(c['ok']) for c in s.checks])}/{len(s.checks)}" if s.checks else ""
        numbers = ", ".join([f"{n} {x:g}" for n, x in [*s.metrics.items()][:_NUM_METRICS]])
        note = s.why or numbers
        lines.append(f"{s.name:10s} {s.status.value:8s} {s.seconds:6.1f}  {passed:8s} {note}")
    verdicts = result.verdicts
    words = [v.word for v in verdicts]
    lines.append(
        f"predictions: {words.count('hit')} hit, {words.count('miss')} missed,"
        f" {words.count('not measured')} not measured"
    )
    lines += [
        f"  {v.word}: {v.prediction.name} {v.measured:.4g}, expected {v.prediction.low:g} to"
        f" {v.prediction.high:g}"
        for v in sorted(verdicts, key=lambda v: v.word, reverse=True)
        if v.measured is not None
    ]
    failed = [f"FAIL {text}" for text in result.failures]
    return "\n".join([line[:TABLE_WIDTH] for line in _fitted(lines, failed)])


def _fitted(lines: list[str], failed: list[str]) -> Iterable[str]:
    """Yield at most 40 lines; what failed comes last, and before anything is left out."""
    failed = failed[: TABLE_LINES // 2]
    room = TABLE_LINES - len(failed)
    yield from lines if len(lines) <= room else [*lines[: room - 1], "  ... and more in check.md"]
    yield from failed


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "/")
