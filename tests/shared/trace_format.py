"""The Trace Event Format of Chrome's tracing tools, read anew: what a reader of traces relies on.

Source: "Trace Event Format" (Duca and Sinclair, 2016), sections on duration, counter, flow and
metadata events.
"""

import json
import math

METADATA = {
    "process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int,
}  # fmt: skip


def read_trace(text):
    """Return the events of a trace, each of which is as the format wants it."""
    events = json.loads(text, parse_constant=lambda name: 1 / 0)["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str)
        assert event["pid"] > 0
        check, other = CHECKS[event["ph"]]
        check(event)
        assert {*event} <= {"ph", "name", "pid", "args", *other}
        if event["ph"] != "M":
            assert math.isfinite(event["ts"])
            assert event["ts"] >= 0
    flows = [(e["pid"], e["id"], e["ph"]) for e in events if e["ph"] in "sf"]
    assert len({*flows}) == len(flows)
    assert {flow[:2] for flow in flows if flow[2] == "s"} == {f[:2] for f in flows if f[2] == "f"}
    return events


def _metadata(event):
    (value,) = event["args"].values()
    assert isinstance(value, METADATA[event["name"]])


def _complete(event):
    assert event["dur"] >= 0
    assert event["tid"] > 0


def _counter(event):
    assert event["args"]
    assert all(isinstance(value, (int, float)) for value in event["args"].values())


def _flow(event):
    assert isinstance(event["id"], int)
    assert event["tid"] > 0


CHECKS = {
    "M": (_metadata, {"tid"}),
    "X": (_complete, {"tid", "ts", "dur", "cat"}),
    "C": (_counter, {"ts"}),
    "s": (_flow, {"tid", "ts", "id", "cat"}),
    "f": (_flow, {"tid", "ts", "id", "cat", "bp"}),
}


def counters_of(events):
    """Return the times and values of each counter by its name and series, in their order."""
    counters = {}
    for event in events:
        if event["ph"] == "C":
            for series, value in event["args"].items():
                counters.setdefault((event["name"], series), []).append((event["ts"], value))
    assert all(values == sorted(values, key=lambda pair: pair[0]) for values in counters.values())
    return counters
