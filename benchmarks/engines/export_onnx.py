"""Write a row's inference as a file of ONNX: python export_onnx.py ROW FILE.

In a process of its own, so that an engine that reads the file has none of ours beside it. Opset 20
has GELU in its tanh form as one operator.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from rows.all_rows import find_row  # noqa: E402

import actorflow as af  # noqa: E402
from engines.actorflow_models import FAMILIES, job_of, without  # noqa: E402

if __name__ == "__main__":
    row = find_row(sys.argv[1])
    model, scores = FAMILIES[row.family](row)
    model.load(row.weights())
    batch = without(row.batches(), "y")[0]
    af.onnx.export(job_of(row, "fp32", scores), model, batch, sys.argv[2], opset=20)
