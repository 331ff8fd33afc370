import json
import threading

import pytest

from actors.table import Edge, MachineTable
from actors.timeline import Timeline, write_chrome_trace


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
    with pytest.raises(ValueError, match="got 0"):
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
    timeline.write_chrome_trace(path, table, stream_names=("compute", "data"))
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "compute", 1: "data"}
    boxes = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert boxes == [("data", 1, 0.0, 2.0), ("data", 1, 2.0, 2.0), ("step", 0, 4.0, 4.0)]


def test_an_arrow_joins_the_maker_of_the_first_token_to_its_reader(tmp_path, table):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, ROWS, table, has_arrows=True)
    arrows = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] in "sf"]
    assert [(e["ph"], e["tid"], e["ts"], e["id"]) for e in arrows] == [
        ("s", 1, 2.0, 0),
        ("f", 0, 4.0, 0),
    ]


def test_a_trace_without_firings_is_still_a_trace(tmp_path, table):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, (), table)
    assert [e["ph"] for e in json.loads(path.read_text())["traceEvents"]] == ["M", "M"]
