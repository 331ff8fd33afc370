"""Which tests belong to what was changed: `python tests/affected.py` prints their files.

To a file of the product, and to one in `tests/shared`, belong the tests of its name, and those
that import it; to a test file itself, to a conftest its folder, to a page the tests of pages. What
changed is what git sees against the last commit, or, where nothing did, what that commit changed.
Tests of the file's name and changed tests always run, others from the nearest on where they fit
`BUDGET_SECONDS` by `tests/durations.json`: a line on stderr says how many are left to `make test`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

import tiers  # noqa: E402

ALWAYS = ("tests/system/test_smoke.py",)
"""A whole job, in a second."""

PAGES = (
    *("tests/system/test_readme.py", "tests/system/test_tour.py", "tests/system/test_docs.py"),
    "tests/system/test_docs_site.py",
)
"""What runs the code on pages and compares what they say."""

BUDGET_SECONDS = 100.0
"""What all tests together may take on one core before more are added; two have 50 s for it."""

_IMPORTS = re.compile(
    r"^\s*(?:from ([\w.]+) import ([^\n(]+|\([^)]*\))|import ([\w.]+))", re.MULTILINE
)


def imported(text: str) -> frozenset[str]:
    """Return the modules that a text of Python may import, by name."""
    found = set()
    for source, names, module in _IMPORTS.findall(text):
        found.add(source or module)
        found.update(f"{source}.{name}" for name in re.findall(r"\w+", names) if source)
    return frozenset(found)


def affected(
    changed: Iterable[str], tests: Mapping[str, frozenset[str]], seconds: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Return the test files to run, and those that would belong but are too many.

    Args:
        changed: paths from the root of the repository, as git writes them.
        tests: for each test file what it imports.
        seconds: what test files take, as far as it is known.
    """
    chosen: dict[str, None] = dict.fromkeys(ALWAYS)
    left: dict[str, None] = {}
    for name in changed:
        path = PurePosixPath(name)
        if path.parts[0] == "tests":
            if path.name == "conftest.py" and len(path.parts) > 2:
                left.update(dict.fromkeys(n for n in tests if n.startswith(f"{path.parent}/")))
            elif name in tests:
                chosen[name] = None
            elif path.parts[1] == "shared":
                left.update(dict.fromkeys(n for n in tests if path.stem in tests[n]))
        elif path.suffix == ".md" or path.parts[0] in ("docs", "examples"):
            chosen.update(dict.fromkeys(PAGES))
        elif path.suffix in (".py", ".c", ".h"):
            own, others = _of_product(path, tests)
            chosen.update(dict.fromkeys(own))
            left.update(dict.fromkeys(others))
    spent = sum([seconds.get(name, tiers.UNKNOWN_SECONDS) for name in chosen])
    for name in [name for name in left if name not in chosen]:
        lasts = seconds.get(name, tiers.UNKNOWN_SECONDS)
        if spent + lasts <= BUDGET_SECONDS:
            chosen[name] = None
            spent += lasts
    return list(chosen), [name for name in left if name not in chosen]


def _of_product(
    path: PurePosixPath, tests: Mapping[str, frozenset[str]]
) -> tuple[list[str], list[str]]:
    """Return the tests of a file's name, and others that may notice a change, the nearest first."""
    folder = PurePosixPath("tests") / path.parent
    named = f"test_{path.stem}.py"
    own = [name for name in (str(folder / named), f"tests/system/{named}") if name in tests]
    module = ".".join([*path.parts[:-1], path.stem])
    importers = [name for name, modules in tests.items() if module in modules and name not in own]
    importers.sort(key=lambda name: (not name.startswith(f"{folder}/"), name))
    if not own and not importers:  # nobody names it: its neighbours use it
        importers = [name for name in tests if PurePosixPath(name).parent == folder]
    return own, importers


def changed_files() -> list[str]:
    """Return what git sees as changed, or what the last commit changed."""
    now = _git("diff", "--name-only", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    return now or _git("diff", "--name-only", "HEAD~1", "HEAD")


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def main() -> None:
    """Print the files, one a line."""
    tests = {
        str(file.relative_to(ROOT)): imported(file.read_text())
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    changed = [name for name in changed_files() if (ROOT / name).exists()]
    # Of what `make test` runs natively, only nightly has the time with numpy's kernels.
    seconds = tiers.known_seconds("numpy") | tiers.known_seconds("merge")
    chosen, left = affected(changed, tests, seconds)
    if left:
        sys.stderr.write(f"make check leaves {len(left)} more test files to make test\n")
    sys.stdout.write("\n".join(chosen) + "\n")


if __name__ == "__main__":
    main()
