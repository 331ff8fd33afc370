"""What the page on pipelines shows runs as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipelines.md"


def test_the_blocks_of_the_page_run_one_after_the_other(run_python, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    done = run_python("\n".join(blocks))
    assert "step 20" in done.stdout
