"""What `actorflow report` takes for a long run, and how fast a browser opens the page.

    python benchmarks/bench_report.py [--steps 1000000] [--series 20] [--chromium chromium]

A folder gets a `metrics.jsonl` of so many steps of noisy curves. The page is made by the command,
in a process of its own. Then a headless chromium takes a picture of it, alternately with an empty
page: from the start of the process to the picture, so the difference is what the report takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MEASURED = """
import resource, sys, time
from actorflow.cli.main import main
start = time.perf_counter()
code = main(["report", sys.argv[1], "--out", sys.argv[2]])
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{time.perf_counter() - start:.1f} s, peak RSS {peak_mb:,.0f} MiB")
sys.exit(code)
"""
CHUNK = 10_000


def main() -> None:
    """Write the metrics, make the page, open it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--series", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chromium", default="chromium")
    options = parser.parse_args()
    browser = shutil.which(options.chromium)
    if browser is None:
        parser.error(f"--chromium: there is no program {options.chromium!r}")
    with tempfile.TemporaryDirectory() as name:
        run, page, empty = Path(name, "run"), Path(name, "page.html"), Path(name, "empty.html")
        run.mkdir()
        size_bytes = write_metrics(run / "metrics.jsonl", options.steps, options.series)
        print(f"{options.steps:,} steps x {options.series} series: {size_bytes / 1e6:,.0f} MB")
        subprocess.run([sys.executable, "-c", MEASURED, run, page], cwd=ROOT, check=True)
        print(f"page: {page.stat().st_size / 1e6:.2f} MB")
        empty.write_text("<!doctype html><title>empty</title>")
        rounds = [[opened(browser, path) for path in (empty, page)] for _ in range(options.rounds)]
        for title, seconds in zip(("empty page", "report"), zip(*rounds, strict=True), strict=True):
            median, low, high = statistics.median(seconds), min(seconds), max(seconds)
            print(f"{title}: {median:.2f} s ({low:.2f} to {high:.2f}) with the browser's start")


def write_metrics(path: Path, num_steps: int, num_series: int) -> int:
    """Write noisy curves, and return the size of the file in bytes."""
    rng = np.random.default_rng(0)
    names = [f"metric{number}" for number in range(num_series)]
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, num_steps, CHUNK):
            steps = np.arange(first, min(first + CHUNK, num_steps))
            noise = rng.normal(size=(steps.size, num_series))
            values = (100 / (steps[:, None] + 100) + 0.1 * noise).round(6).tolist()
            for step, row in zip(steps.tolist(), values, strict=True):
                line = {"step": step, "since_step": 0, **dict(zip(names, row, strict=True))}
                file.write(json.dumps(line) + "\n")
    return path.stat().st_size


def opened(browser: str, page: Path) -> float:
    """Return the seconds that a new browser takes until it has a picture of a page."""
    picture = page.with_suffix(".png")
    command = [browser, "--headless", "--no-sandbox", "--window-size=1200,900"]
    start = time.perf_counter()
    subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
