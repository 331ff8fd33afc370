"""What was measured, as values; and as the JSON that `--json` writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MB = 1e6
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine on one row.

    `ms` is the median of the means of `num_chunks` groups of steps. `above_mb` is the peak of the
    resident set while steps run, less what the engine alone takes (its imports) and less parameters
    and optimizer state. `first_step_s` is from the start of the process to the first loss, with
    warm caches; `cold_first_step_s` with empty ones, and None where that was not measured.
    `busy_slowdown` is how much longer a step takes while another process keeps a core busy.
    `idle_share` is the share of a core that the engine burned while others ran.
    """

    engine: str
    variant: str
    settings: str
    ms: float
    num_chunks: int
    peak_rss_mb: float
    above_mb: float
    first_step_s: float
    cold_first_step_s: float | None = None
    busy_slowdown: float | None = None
    idle_share: float = 0.0


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row: ours, the rivals, and who failed why. `flops` are those of one step, of the model."""

    row: str
    precision: str
    items: int
    item: str
    flops: float
    ours: Measured | None
    rivals: tuple[Measured, ...]
    failures: tuple[str, ...]

    @property
    def best_rival(self) -> Measured | None:
        """The fastest rival, None where all failed."""
        return min(self.rivals, key=lambda m: m.ms, default=None)

    @property
    def ratio_to_best_rival(self) -> float | None:
        """How many times as fast as the best rival we are."""
        best = self.best_rival
        return None if best is None or self.ours is None else best.ms / self.ours.ms

    def items_per_s(self, measured: Measured) -> float:
        """Return the items of a second."""
        return self.items / measured.ms * 1e3

    def gflops(self, measured: Measured) -> float:
        """Return the model's arithmetic per second, 0 where it is not known."""
        return self.flops / measured.ms / 1e6


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Where it was measured; `gemm_gflops` is the best product of 2048^3 in fp32 by library."""

    processor: str
    num_cores: int
    gemm_gflops: Mapping[str, float]

    @property
    def peak_gflops(self) -> float:
        """The machine's measured fp32 peak, 0 where nothing was measured."""
        return max(self.gemm_gflops.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Bench:
    """A whole comparison."""

    machine: MachineInfo
    rows: tuple[RowResult, ...]


def as_json(bench: Bench) -> dict[str, Any]:
    """Return what `--json` writes; numbers that are not known are null."""
    machine = bench.machine
    return {
        "machine": {
            "processor": machine.processor,
            "cores": machine.num_cores,
            "peak_gflops": _rounded(machine.peak_gflops),
            "gemm_gflops": {n: _rounded(g) for n, g in machine.gemm_gflops.items()},
        },
        "rows": [_row(result, machine.peak_gflops) for result in bench.rows],
    }


def _row(result: RowResult, peak: float) -> dict[str, Any]:
    row: dict[str, Any] = {"row": result.row, "precision": result.precision}
    names = ("ms", "items_per_s", "gflops", "peak_rss_mb", "first_step_s")
    ours = result.ours
    row |= dict.fromkeys(names) if ours is None else _engine(result, ours, peak)
    row["rivals"] = {m.engine: _engine(result, m, peak) for m in result.rivals}
    row["ratio_to_best_rival"] = _rounded(result.ratio_to_best_rival)
    row["failures"] = list(result.failures)
    return row


def _engine(result: RowResult, measured: Measured, peak: float) -> dict[str, Any]:
    gflops = result.gflops(measured) or None
    return {
        "ms": _rounded(measured.ms),
        "items_per_s": _rounded(result.items_per_s(measured)),
        "gflops": _rounded(gflops),
        "peak_fraction": _rounded(gflops / peak if gflops and peak else None),
        "peak_rss_mb": _rounded(measured.peak_rss_mb),
        "above_state_mb": _rounded(measured.above_mb),
        "first_step_s": _rounded(measured.first_step_s),
        "cold_first_step_s": _rounded(measured.cold_first_step_s),
        "busy_slowdown": _rounded(measured.busy_slowdown),
        "idle_share": _rounded(measured.idle_share),
        "variant": measured.variant,
        "settings": measured.settings,
    }


def _rounded(number: float | None) -> float | None:
    """Keep five digits; what is not finite is null, for JSON has no word for it."""
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.5g}")
