"""Which tests two checkouts collect: `python tests/collected.py BEFORE [AFTER]`.

A test is known by the name of its file, without folders, and its own id. So files may move between
folders; a test that is gone, or renamed, is printed, and the exit status is 1. Each checkout needs
the environment that `make` gave it. `--renamed FILE` takes lines `old id -> new id`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def ids(listing: str) -> Counter[str]:
    """Return the ids in what `pytest --collect-only -q` prints, files without their folders."""
    lines = [line for line in listing.splitlines() if line.startswith("tests/") and "::" in line]
    return Counter([without_folder(line) for line in lines])


def without_folder(test_id: str) -> str:
    file, colons, rest = test_id.partition("::")
    return file.rpartition("/")[2] + colons + rest


def missing(before: Counter[str], after: Counter[str], renamed: dict[str, str]) -> list[str]:
    """Return the ids of before that are not collected any more, each as often as it is missing."""
    wanted = Counter([renamed.get(test_id, test_id) for test_id in before.elements()])
    return sorted((wanted - after).elements())


def collect(root: Path) -> Counter[str]:
    """Return what a checkout collects. Exits where it cannot."""
    command = [str(root / ".venv/bin/python"), "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{root}: the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr}")
    return ids(done.stdout)


def main() -> None:
    """Print how many tests there are, and what is gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--renamed", type=Path)
    args = parser.parse_args()
    renamed = {}
    if args.renamed:
        pairs = [line.split(" -> ") for line in args.renamed.read_text().splitlines() if line]
        renamed = dict(pairs)
    before, after = collect(args.before), collect(args.after)
    gone = missing(before, after, renamed)
    for test_id in gone:
        print(f"gone: {test_id}")
    print(f"{before.total()} tests before, {after.total()} after, {len(gone)} gone")
    sys.exit(1 if gone else 0)


if __name__ == "__main__":
    main()
