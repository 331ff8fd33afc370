"""docs/ops.md says the same on every machine: nothing in it is chosen by a measurement."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = ["matmul", "vector @ vector", "batch @ vector", "dot", "addmm", "adaptive_max_pool1d"]
PROGRAM = f"""
import sys
sys.path.insert(0, "docs")
import write_ops
from actors.kernels.library import tuning

def measured(*_):
    raise AssertionError("a product was measured")

tuning._measured = measured
page = write_ops.PAGE.read_text(encoding="utf-8").splitlines()
rows = [write_ops.row(case) for _, case in write_ops.cases() if case.name in {ROWS!r}]
print(len(rows) >= {len(ROWS)}, [row for row in rows if row not in page])
"""


def test_rows_of_the_page_need_no_measurement_and_are_there():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True []\n", done.stdout + done.stderr
