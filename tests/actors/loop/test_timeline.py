import json
import threading
from dataclasses import replace
from random import Random

import pytest
from error_texts import raises

from actors.loop.timeline import Timeline, write_chrome_trace
from actors.machine.table import Edge, MachineTable
from actors.simulation.simulate import simulate


def test_rows_come_back_in_order_of_start():
    timeline = Timeline(4)
    timeline.record(1, 0, 30, 40)
    timeline.record(0, 0, 10, 20)
    assert timeline.rows() == ((0, 0, 10, 20), (1, 0, 30, 40))


def test_a_full_ring_keeps_the_newest_rows():
    timeline = Timeline(3)
    for firing in range(5):
        timeline.record(0, firing, firing + 1, firing + 2)
    assert [row[1] for row in timeline.rows()] == [2, 3, 4]


def test_threads_may_record_at_once_without_losing_rows():
    timeline = Timeline(4000)

    def record(actor):
        for firing in range(1000):
            timeline.record(actor, firing, 1, 2)

    threads = [threading.Thread(target=record, args=(actor,)) for actor in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row[:2] for row in timeline.rows()} == {(a, f) for a in range(4) for f in range(1000)}


def test_a_timeline_without_room_is_refused():
    with raises(ValueError):
        Timeline(0)


@pytest.fixture
def table():
    edges = [Edge("micro", 0, 1, 1, 2, 2)]
    return MachineTable.from_edges(["data", "step"], edges, sources=[0], streams=[1, 0])


ROWS = ((0, 0, 1000, 3000), (0, 1, 3000, 5000), (1, 0, 5000, 9000))


def test_the_trace_has_a_track_per_stream_and_times_in_microseconds(tmp_path, table):
    timeline = Timeline(8)
    for row in ROWS:
        timeline.record(*row)
    path = tmp_path / "trace.json"
    write_chrome_trace(path, timeline.rows(), table, stream_names=("compute", "data"))
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "compute", 2: "data"}
    boxes = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert boxes == [("data", 2, 0.0, 2.0), ("data", 2, 2.0, 2.0), ("step", 1, 4.0, 4.0)]


def events_of(path, rows, table, **options):
    write_chrome_trace(path, rows, table, **options)
    return json.loads(path.read_text())["traceEvents"]


def test_an_arrow_joins_every_firing_that_makes_tokens_to_those_that_read_them(tmp_path, table):
    arrows = [
        e for e in events_of(tmp_path / "trace.json", ROWS, table, has_arrows=True)
        if e["ph"] in "sf"
    ]  # fmt: skip
    assert [(e["ph"], e["tid"], e["ts"], e["id"]) for e in arrows] == [
        ("s", 2, 2.0, 0),
        ("f", 1, 4.0, 0),
        ("s", 2, 4.0, 1),
        ("f", 1, 4.0, 1),
    ]


def test_initial_tokens_and_rows_that_the_ring_forgot_have_no_arrow(tmp_path):
    table = MachineTable.from_edges(
        ["data", "save"], [Edge("updated", 0, 1, 1, 3, 3, initial=2)], sources=[0]
    )
    rows = [(0, 0, 10, 20), (1, 0, 20, 30), (0, 2, 40, 50), (0, 3, 50, 60), (1, 1, 60, 70)]
    arrows = [
        (e["ph"], e["ts"]) for e in events_of(tmp_path / "t.json", rows, table, has_arrows=True)
        if e["ph"] in "sf"
    ]  # fmt: skip
    assert arrows == [
        ("s", 0.01), ("f", 0.01),  # of the first firing only one token was made
        ("s", 0.04), ("f", 0.05), ("s", 0.05), ("f", 0.05),  # the row of firing 1 is gone
    ]  # fmt: skip


def test_a_firing_tells_what_it_waited_for_last_and_how_long(tmp_path):
    edges = [Edge("batch", 0, 1, 1, 1, 2), Edge("loss", 1, 2, 1, 1, 1)]
    table = MachineTable.from_edges(["data", "step", "log"], edges, sources=[0])
    rows = [
        (0, 0, 1_000, 2_000), (1, 0, 2_000, 3_000), (2, 0, 3_000, 9_000),
        (0, 1, 2_000, 7_000), (1, 1, 9_000, 10_000), (0, 2, 7_000, 8_000),
    ]  # fmt: skip
    told = {
        (e["name"], e["args"]["firing"]): {k: v for k, v in e["args"].items() if k != "firing"}
        for e in events_of(tmp_path / "t.json", rows, table) if e["ph"] == "X"
    }  # fmt: skip
    assert told == {
        ("data", 0): {},
        ("step", 0): {"waited_for": "input batch"},
        ("log", 0): {"waited_for": "input loss"},
        ("data", 1): {},
        ("step", 1): {"waited_for": "register loss", "waited_us": 6.0},
        ("data", 2): {},
    }


def test_a_simulated_firing_begins_when_what_it_waited_for_last_has_ended(tmp_path, make_random):
    for seed in range(40):
        table = make_random(Random(seed))
        # A flushed firing takes what is there; what let it begin is an end, and no firing.
        table = replace(table, is_flushed=(False,) * table.num_actors)
        made = simulate(table, 6, [100.0] * table.num_actors, seed=seed, jitter=0.5)
        ends = {row[:2]: row[3] for row in made.rows}
        starts = {row[:2]: row[2] for row in made.rows}
        path = tmp_path / "t.json"
        for event in events_of(path, made.rows, table, has_arrows=True):
            if event["ph"] == "X" and "waited_us" in event["args"]:
                actor, firing = table.names.index(event["name"]), event["args"]["firing"]
                ready = ends[actor, firing - 1] + event["args"]["waited_us"] * 1e3
                assert ready == pytest.approx(starts[actor, firing])


def test_a_trace_without_firings_is_still_a_trace(tmp_path, table):
    events = events_of(tmp_path / "trace.json", (), table)
    assert [e["name"] for e in events] == [
        "process_sort_index", *["thread_name", "thread_sort_index"] * 2
    ]  # fmt: skip
