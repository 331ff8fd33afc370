"""What a check measured, beside what is planned by now; no GPU is needed.

    python benchmarks/gpu/replan.py OUT_DIR [--gpu h100] [--no-cudnn]

Prints the steps of OUT_DIR/check.json and the launches of its section of rates, with what the
description of the GPU and the estimates of kernels say today: so both can be mended after a card is
gone. Ratios are of planned by measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

Measured = Mapping[str, float]


def measured_in(check: Path) -> tuple[Measured, Measured]:
    """Return the ms of steps by row, and the us of launches by probe, of a check.json."""
    sections = {s["name"]: s for s in json.loads(check.read_text(encoding="utf-8"))["sections"]}
    none: dict[str, dict] = {"metrics": {}, "facts": {}}
    metrics = sections.get("ours", none)["metrics"]
    end = "_simulated_ms"
    steps = {n.removesuffix(end): metrics[f"{n.removesuffix(end)}_ms"] for n in metrics if end in n}
    facts = sections.get("rates", none)["facts"]
    launches = {n: float(told.partition(" us, ")[0]) for n, told in facts.items()}
    return steps, launches


def planned_steps(rows: Measured) -> Measured:
    """Return the ms of steps as planned by now."""
    from rows.all_rows import find_row

    from gpu.planned import plan_of, simulated_s

    known = [find_row(name) for name in rows]
    return {row.name: 1e3 * simulated_s(plan_of(row, row.precisions[-1])) for row in known}


def planned_launches(names: Measured) -> Measured:
    """Return the us of launches as planned by now, of probes that there are."""
    from gpu.launched import bind_probe
    from gpu.sections.rates import PROBES

    bound = [bind_probe(mock.Mock(), probe, 1 << 40) for probe in PROBES if probe.name in names]
    return {launch.name: launch.planned_ns / 1e3 for launch in bound}


def lines(measured: Measured, planned: Measured, unit: str) -> list[str]:
    """Return a table, the worst first."""
    ratios = {name: planned[name] / measured[name] for name in planned}
    order = sorted(ratios, key=lambda name: -max(ratios[name], 1 / ratios[name]))
    return [
        f"| planned by measured | measured {unit} | planned {unit} | |",
        "|--:|--:|--:|---|",
        *[f"| {ratios[n]:.2f} | {measured[n]:.3f} | {planned[n]:.3f} | {n} |" for n in order],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--no-cudnn", action="store_true")
    options = parser.parse_args()
    os.environ["ACTORFLOW_GPU"] = options.gpu
    os.environ["ACTORFLOW_CUDNN"] = str(int(not options.no_cudnn))
    os.environ["ACTORFLOW_CACHE"] = "off"  # a plan that was kept has the durations of its day
    steps, launches = measured_in(options.out / "check.json")
    print("\n".join(lines(steps, planned_steps(steps), "ms")))
    print("\n".join(["", *lines(launches, planned_launches(launches), "us")]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
