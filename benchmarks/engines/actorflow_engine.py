"""actorflow as an engine of the comparison: `stream` of a job trains, `step` of one infers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from rows.row import Row  # noqa: E402

from actorflow.environment.native import enable_native  # noqa: E402
from actorflow.environment.settings import (  # noqa: E402
    Settings,
    __version__,
)
from actors.kernels.common.gemm import gemm_of, view_of_array  # noqa: E402
from actors.kernels.library import runtime  # noqa: E402
from actors.kernels.library.gemm_launch import gemm_launch, workspace_bytes  # noqa: E402
from actors.kernels.native.matmul import LIBRARIES  # noqa: E402
from engines.actorflow_models import Running, start  # noqa: E402
from engines.flops import model_flops  # noqa: E402
from engines.launches import launch_table, launch_times_ns  # noqa: E402
from engines.serve import gemm_operands, serve  # noqa: E402


class Session(Running):
    def describe(self) -> dict[str, object]:
        graph = self.job.graph(self.model, self.data.spec())
        return {"flops": model_flops(graph), "settings": f"actorflow {__version__}"}

    def launches(self) -> list[dict[str, object]]:
        plan = self.plan()
        return launch_table(plan, launch_times_ns(plan, self.model.state(), self.data.batch))


class Actorflow:
    def prepare(self, row: Row, precision: str, variant: str, device: str) -> Session:
        return start(row, precision, Session, device=device)

    def gemm(self, precision: str) -> dict[str, Callable[[], object]]:
        a, b = gemm_operands()
        if precision == "bf16":  # the upper halves, as our kernels take them
            a, b = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
            return native_gemms(a, b, np.empty_like(a))
        out = np.empty_like(a)
        products = {"numpy": lambda: np.matmul(a, b, out=out)}
        return products | native_gemms(a, b, out)


def native_gemms(a, b, out) -> dict[str, Callable[[], object]]:
    """Return the product by every native library that takes it."""
    enable_native(Settings.from_env(os.environ))
    gemm = gemm_of(*[view_of_array(array) for array in (a, b, out)])
    products = {}
    for library in LIBRARIES if runtime.is_enabled() else ():
        size = workspace_bytes(library, gemm)
        if size is not None:
            raw = np.empty(size + 64, np.uint8)
            workspace = raw[-raw.ctypes.data % 64 :][:size]
            products[library.name] = gemm_launch(library, gemm, (a, b, out), workspace)
    return products


if __name__ == "__main__":
    serve(Actorflow)
