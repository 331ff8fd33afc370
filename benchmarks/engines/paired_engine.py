"""One row of the checkout that PYTHONPATH names, for `paired.py`: public names of it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rows.row import Row

from engines.actorflow_models import Running, start
from engines.serve import serve


@dataclass(slots=True)
class Session:
    running: Running

    def step(self) -> float:
        return self.running.step()

    def run(self, steps: int) -> None:
        self.running.run(steps)

    def describe(self) -> dict[str, object]:
        plan = self.running.plan()
        return {
            "arena_bytes": sum([account.peak_bytes for account in plan.memory]),
            "launches": sum([len(actor.launches) for actor in plan.actors]),
        }

    def launches(self) -> list[dict[str, object]]:
        return []


class Checkout:
    def prepare(self, row: Row, precision: str, variant: str) -> Session:
        return Session(start(row, precision))

    def gemm(self) -> dict[str, Callable[[], object]]:
        return {}


if __name__ == "__main__":
    serve(Checkout)
