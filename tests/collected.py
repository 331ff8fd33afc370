"""Which tests two checkouts run: `python tests/collected.py BEFORE [AFTER] [--runs]`.

A test is known by the name of its file, without folders, and its own id. So files may move between
folders; a test that is gone, or renamed, is printed, and the exit status is 1. With `--runs`, all
runs of continuous integration are compared, each with its options: what `.ci/run` of BEFORE called
(`RUNS`, of version 0.1), and what the parts of `make nightly` of AFTER call together. Each checkout
needs the environment that `make` gave it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PARTS = 8

_SYSTEM = (
    "smoke accumulate evaluation resume runner streams skipped_steps offload recompute user_ops"
)
_ON_CUDA = "smoke accumulate evaluation resume runner skipped_steps offload"


def _of_system(names: str) -> list[str]:
    return [f"tests/system/test_{name}.py" for name in names.split()]


RUNS = {
    "numpy": [],
    "native": ["--native", "tests/system", "tests/actorflow"],
    "sim": ["--device", "sim", "tests/system/state", *_of_system(_SYSTEM)],
    "cuda": [
        *("--device", "cuda", *_of_system(_ON_CUDA), "--deselect"),
        "tests/system/test_resume.py::test_kills_at_any_moment_change_nothing",
    ],
    "cuda-packages": [
        *("-m", "cuda", "tests/actors", "tests/benchmarks/gpu/test_usage_gpt2.py"),
        "tests/system/test_texts_of_a_gpu.py",
    ],
    "torch": ["--torch", "tests/oracle"],
    "torch-native": ["--native", "-k", "float32", "tests/oracle"],
    "torch-cuda": ["--device", "cuda", "-k", "float32", "tests/oracle"],
    "oldest-numpy": [
        *("tests/actors/kernels", "tests/compiler/ops", "tests/actorflow/data"),
        *[f"tests/compiler/test_{n}.py" for n in ("ops", "ops_simplify", "bfloat16", "gradients")],
        *_of_system("smoke oracle precision runner"),
    ],
}
"""Options and paths of pytest in `.ci/run` before there were tiers."""


def ids(lines: Iterable[str], run: str = "") -> Counter[str]:
    """Return the tests among lines that `pytest --collect-only -q` prints, without folders."""
    tests = [line for line in lines if line.startswith("tests/") and "::" in line]
    return Counter([f"{run} {without_folder(test)}".strip() for test in tests])


def without_folder(test_id: str) -> str:
    file, colons, rest = test_id.partition("::")
    return file.rpartition("/")[2] + colons + rest


def missing(before: Counter[str], after: Counter[str]) -> list[str]:
    """Return the tests of before that are not run any more, each as often as it is missing."""
    return sorted((before - after).elements())


def collect(root: Path, options: Iterable[str] = ()) -> list[str]:
    """Return the lines of what a checkout collects. Exits where it cannot."""
    return _lines(root, "-m", "pytest", "--collect-only", "-q", *options)


def collect_parts(root: Path) -> Counter[str]:
    """Return what the parts of the nightly tests of a checkout run together."""
    found: Counter[str] = Counter()
    for part in range(1, PARTS + 1):
        words = ("nightly", "--part", f"{part}/{PARTS}", "--collect")
        for line in _lines(root, "tests/suite.py", *words):
            run, _, test = line.partition("\t")
            found += ids([test], run)
    return found


def _lines(root: Path, *words: str) -> list[str]:
    done = subprocess.run([".venv/bin/python", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{root}: {' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout.splitlines()


def main() -> None:
    """Print how many tests there are, and what is gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--runs", action="store_true", help="with the options of each run")
    args = parser.parse_args()
    if args.runs:
        runs = [ids(collect(args.before, options), run) for run, options in RUNS.items()]
        before, after = sum(runs, Counter()), collect_parts(args.after)
    else:
        before, after = ids(collect(args.before)), ids(collect(args.after))
    gone = missing(before, after)
    for test in gone:
        print(f"gone: {test}")
    print(f"{before.total()} tests before, {after.total()} after, {len(gone)} gone")
    sys.exit(1 if gone else 0)


if __name__ == "__main__":
    main()
