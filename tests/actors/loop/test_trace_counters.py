"""Counters of a trace: counted again from the firings that the file has."""

from random import Random

import pytest
from trace_format import counters_of, read_trace

from actors.loop.timeline import TraceProcess, shared_origin_ns, write_chrome_trace
from actors.machine.table import OUTSIDE, Edge, MachineTable
from actors.simulation.simulate import simulate


@pytest.fixture
def traced(tmp_path):
    """Write a trace, and return its events."""

    def trace(rows, table, **options):
        write_chrome_trace(tmp_path / "t.json", rows, table, has_arrows=True, **options)
        return read_trace((tmp_path / "t.json").read_text())

    return trace


def firings(events, actor):
    """Starts and ends of an actor's firings, in microseconds, from the boxes of a trace."""
    own = [e for e in events if e["ph"] == "X" and e["name"] == actor]
    return [e["ts"] for e in own], [round(e["ts"] + e["dur"], 6) for e in own]


def recounted(edge, events, names, at):
    """Ready slots of an edge after all that has happened up to a moment."""
    _, ends = firings(events, names[edge.producer])
    starts, _ = firings(events, names[edge.consumer])
    made = edge.initial + edge.produce * sum(end <= at for end in ends)
    return made - edge.consume * sum(start <= at for start in starts)


def test_ready_slots_are_what_was_made_and_not_yet_taken(traced, make_random):
    seen = 0
    for seed in range(30):
        table = make_random(Random(seed))
        if any(table.is_flushed):
            continue
        rows = simulate(table, 5, [1000.0] * table.num_actors, seed=seed, jitter=0.5).rows
        events = traced(rows, table)
        counters = counters_of(events)
        for edge in table.edges:
            key = f"register {edge.name}", table.names[edge.consumer]
            if edge.producer == OUTSIDE:  # a step that may begin is no slot
                assert key not in counters
                continue
            last = dict(counters[key])  # of several values at one moment the last stands
            for at, value in last.items():
                assert value == recounted(edge, events, table.names, at)
                assert 0 <= value <= edge.num_slots + edge.initial
                seen += 1
    assert seen > 500


EDGES = [Edge("batch", 0, 1, 1, 2, 4), Edge("loss", 1, 2, 1, 1, 1)]


def made_of(edges):
    table = MachineTable.from_edges(["data", "step", "log"], edges, sources=[0])
    return simulate(table, 9, [100.0, 300.0, 50.0], seed=1, jitter=0.3)


def test_rows_that_the_ring_forgot_count_as_done(traced):
    made = made_of(EDGES)
    whole = counters_of(traced(made.rows, made.table, process=TraceProcess(origin_ns=0)))
    kept = sorted(made.rows, key=lambda row: row[2])[len(made.rows) // 2 :]
    later = counters_of(traced(kept, made.table, process=TraceProcess(origin_ns=0)))
    after = max(row[3] for row in made.rows if row not in kept) / 1e3
    for key, values in later.items():
        expected = [pair for pair in whole[key] if pair[0] > after]
        assert [pair for pair in values if pair[0] > after] == expected
    assert len(later) == 2


def test_a_register_of_which_half_is_not_known_has_no_counter(traced):
    made = made_of(EDGES)
    only = [row for row in made.rows if row[0] < 2 and row[1] > 0]
    assert list(counters_of(traced(only, made.table))) == [("register batch", "step")]


def test_a_flushed_firing_takes_no_more_than_there_is(traced):
    table = MachineTable.from_edges(
        ["data", "step", "log"], EDGES, sources=[0], flushed=[1]
    )  # fmt: skip
    rows = [(0, 0, 0, 10), (1, 0, 20, 30)]
    values = counters_of(traced(rows, table))["register batch", "step"]
    assert values == [(0.01, 1), (0.02, 0)]


def test_the_number_of_counters_has_a_bound_and_the_newest_are_kept(traced):
    rows = [(0, firing, 10 * firing, 10 * firing + 5) for firing in range(140_000)]
    table = MachineTable.from_edges(["data", "step", "log"], EDGES, sources=[0])
    values = counters_of(traced(rows, table))["register batch", "step"]
    assert len(values) == 1 << 17
    assert values[-1][1] == 140_000


def test_traces_of_ranks_are_put_together_without_mixing_them(tmp_path):
    made, origin = made_of(EDGES), shared_origin_ns()
    rows = [
        (a, k, origin + 10**15 // 7 + start, origin + 10**15 // 7 + end)
        for a, k, start, end in made.rows
    ]
    together = []
    for rank in range(3):
        path = tmp_path / f"{rank}.json"
        process = TraceProcess(f"rank {rank}", rank, origin)
        write_chrome_trace(path, rows, made.table, has_arrows=True, process=process)
        together.append(read_trace(path.read_text()))
    names = {
        e["pid"]: e["args"]["name"] for one in together for e in one if e["name"] == "process_name"
    }
    assert names == {1: "rank 0", 2: "rank 1", 3: "rank 2"}
    arrows = [{e["id"] for e in one if e["ph"] in "sf"} for one in together]
    assert sum(map(len, arrows)) == len(set.union(*arrows)) > 0
    for one in together:  # exact to the nanosecond, though all count from days ago
        boxes = sorted([(e["ts"], e["dur"]) for e in one if e["ph"] == "X"])
        assert [(round(1e3 * ts), round(1e3 * dur)) for ts, dur in boxes] == sorted(
            [(start - origin, end - start) for _, _, start, end in rows]
        )


def test_the_shared_origin_is_one_moment_for_all_who_ask():
    first, second = shared_origin_ns(), shared_origin_ns()
    assert abs(first - second) < 1e9
