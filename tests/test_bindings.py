"""Tests know names and behaviour: how often they name what a move or a rename would break."""

import textwrap
from pathlib import Path

import count_rooms
import pytest

HOUSE = Path(__file__).resolve().parents[1]

MOST = {"private_uses": 115, "patches": 184}
"""What is left of 341 and 321. It may only fall; `count_rooms.py --tests` lists each."""


@pytest.fixture(scope="module")
def counts():
    bindings = count_rooms.structure_in_tests(HOUSE).values()
    return {kind: sum([len(getattr(counted, kind)) for counted in bindings]) for kind in MOST}


@pytest.mark.parametrize("kind", MOST)
def test_tests_name_no_more_of_the_structure_than_they_did(counts, kind):
    assert counts[kind] <= MOST[kind], f"see benchmarks/count_rooms.py --tests: {kind}"


@pytest.mark.parametrize("kind", MOST)
def test_what_tests_named_and_name_no_more_stays_so(counts, kind):
    assert MOST[kind] - counts[kind] <= 5, f"{counts[kind]} {kind}: lower MOST"


SAMPLE = textwrap.dedent("""
    import os

    from actors.loop import loop
    from actors.loop.loop import Loop, _still_alive
    from jobs import fake

    TABLE = {}

    class Fake(Loop):
        def __init__(self):
            self._mine = os._exit

        def close(self):
            self._thread.join(self._mine)

    def test_it(monkeypatch):
        Loop(None)._thread._replace(a=1)
        monkeypatch.setattr(loop, "Dispatcher", fake)
        monkeypatch.setattr("actors.loop.loop.Worker", fake)
        monkeypatch.setattr(Fake().inner, "name", fake)
        monkeypatch.setattr(os, "write", fake)
        monkeypatch.setattr("os.write", fake)
        monkeypatch.setattr(fake, "name", 1)
        monkeypatch.setitem(TABLE, "name", 1)
        monkeypatch.setenv("NAME", "1")
""")


def test_uses_and_patches_are_of_what_is_tested_and_not_of_the_test_or_of_others():
    counted = count_rooms.bindings_of(SAMPLE, {"_thread", "_exit", "_mine", "_replace"})
    assert [use.partition(": ")[2] for use in counted.private_uses] == [
        "import _still_alive",
        "Loop(None)._thread",
        "self._thread",
    ]
    assert [patch.partition(": ")[2] for patch in counted.patches] == [
        "loop, 'Dispatcher'",
        "'actors.loop.loop.Worker', fake",
        "Fake().inner, 'name'",
    ]
