"""Which tests a tier runs, and in which order: the same for every process of a run.

The tier `merge` leaves out what the tier `nightly` repeats at greater length: tests marked `slow`,
of a family that differs in its seed alone all but the first, of crossed parameters that are marked
`thinned(n)` all but each n-th, and four of five examples of a property. `tests/durations.json` has
the seconds of each file in each configuration, as the last refresh measured them (`make
durations`). Files run longest first, so that processes side by side end together.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

TIERS = ("merge", "nightly")
DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"

TIER = "TESTS_TIER"
"""A variable that says which tier runs, for modules of tests that are imported, and workers."""

UNKNOWN_SECONDS = 3.0
"""What a file is taken to last that is in no list yet."""

SEEDS = ("seed", "seeds")
"""Parameters whose values are draws of one test."""


def size(nightly: int, *, merge: int) -> int:
    """Return how many draws a test makes in the tier that runs; the nightly one if none is told."""
    return merge if os.environ.get(TIER) == "merge" else nightly


def examples(nightly: int) -> int:
    """Return how many examples of a property `hypothesis` draws: in `merge` a fifth of them."""
    return size(nightly, merge=max(nightly // 5, 5))


def split(items: Iterable) -> tuple[list, list]:
    """Return the tests that the tier `merge` runs, and those that it leaves out."""
    families = defaultdict(list)
    items = list(items)
    for item in items:
        if hasattr(item, "callspec"):
            families[item.nodeid.partition("[")[0]].append(item)
    places = {item: place for family in families.values() for item, place in _places(family)}
    run, left_out = [], []
    for item in items:
        place, mark = places.get(item, {}), item.get_closest_marker("thinned")
        is_left_out = (
            item.get_closest_marker("slow") is not None
            or any(place.get((name,), 0) > 0 for name in SEEDS)
            # Diagonals: each value is met as long as another parameter has n values.
            or (mark is not None and sum([place[g] for g in _groups(item)]) % mark.args[0] != 0)
        )
        (left_out if is_left_out else run).append(item)
    return run, left_out


def _groups(item) -> list[tuple[str, ...]]:
    """Return the parameters of a test, those of one `parametrize` together: their values are rows.

    An item without parameters has none.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    groups = []
    for mark in item.iter_markers("parametrize") if params else ():
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = names.split(",") if isinstance(names, str) else names
        groups.append(tuple([name.strip() for name in names]))
    rows = {name for group in groups for name in group}
    return [*groups, *[(name,) for name in params if name not in rows]]


def _places(family: list) -> Iterator[tuple[object, dict[tuple[str, ...], int]]]:
    """Yield the tests of a function with the place of each row of parameters, and of each value.

    pytest numbers the values of a parameter by the first test that has them, or all tests; the
    order is the same.
    """
    first: dict[tuple[str, ...], dict[tuple[int, ...], int]] = defaultdict(dict)
    keys = {*_groups(family[0]), *[(name,) for name in family[0].callspec.params]}
    for item in family:
        for names in keys:
            numbers, row = first[names], _row(item, names)
            index = max([item.callspec.indices[name] for name in names])
            numbers[row] = min(index, numbers.get(row, index))
    order = {names: sorted(numbers.values()) for names, numbers in first.items()}
    for item in family:
        yield item, {n: order[n].index(first[n][_row(item, n)]) for n in keys}


def _row(item, names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple([id(item.callspec.params[name]) for name in names])


def longest_first(files: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Return files in the order in which two processes that take turns end together."""
    return sorted(files, key=lambda file: (-seconds.get(file, UNKNOWN_SECONDS), file))


def by_files(items: Iterable, seconds: Mapping[str, float]) -> list:
    """Return tests with those of a file together, the longest file first, as they were inside."""
    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("::")[0]].append(item)
    return [item for file in longest_first(groups, seconds) for item in groups[file]]


class Stopwatch:
    """A plugin of pytest that adds up what each file takes, and writes it at the end.

    Files of earlier runs stay: the parts of a configuration are runs of their own.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, defaultdict(float)

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.path.write_text(json.dumps(earlier | self.seconds))


def known_seconds(configuration: str) -> dict[str, float]:
    """Return the seconds of files in a configuration, empty where it was never measured."""
    if not DURATIONS.exists():
        return {}
    return json.loads(DURATIONS.read_text()).get(configuration, {})


def keep(measured: Mapping[str, Mapping[str, float]], is_there: Callable[[str], bool]) -> None:
    """Put what was measured of files into the list; files that are no more go from it."""
    table = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for name, seconds in measured.items():
        files = {file: s for file, s in (table.get(name, {}) | seconds).items() if is_there(file)}
        table[name] = {file: round(s, 1) for file, s in sorted(files.items())}
    DURATIONS.write_text(json.dumps(dict(sorted(table.items())), indent=0) + "\n")
