"""One row of the checkout that PYTHONPATH names, for `paired.py`: public names of it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rows.row import Row

from engines.actorflow_models import Running, start
from engines.serve import serve


class Session(Running):
    def describe(self) -> dict[str, object]:
        plan = self.plan()
        return {
            "arena_bytes": sum([account.peak_bytes for account in plan.memory]),
            "launches": sum([len(actor.launches) for actor in plan.actors]),
        }


class Checkout:
    def prepare(self, row: Row, precision: str, variant: str, device: str) -> Session:
        return start(row, precision, Session)

    def gemm(self, precision: str) -> dict[str, Callable[[], object]]:
        return {}


if __name__ == "__main__":
    serve(Checkout)
