"""How many Python functions a step calls: counts, so they are the same on a busy machine."""

import pytest

from actorflow.run.status import StatusWriter
from benchmarks.count_calls import calls_per_step

pytestmark = pytest.mark.host("the calls counted are those of a run on the host")

RUNTIME = ("machine.py", "columns.py", "table.py", "transitions.py", "dispatch.py", "admission.py",
           "inbox.py", "worker.py", "executor.py")  # fmt: skip
"""Files of what fires actors."""


@pytest.fixture(scope="module")
def calls():
    """Calls of a step that accumulates, evaluates and saves, by thread; no status is due."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatusWriter, "_write", lambda *_: None)
        return calls_per_step(few=10, many=90)


def test_a_firing_costs_the_dispatcher_one_call_beside_its_launches(calls):
    # Four batches and their chains, an update, the metrics, and every other step a snapshot, its
    # sink, and an evaluation: its leave, two batches and their chains, its sink.
    own = {w: n for w, n in calls["actorflow-dispatch"].items() if w.split(":")[0] in RUNTIME}
    assert own.pop("machine.py:Machine.deliver") == 14
    assert sum(own.values()) < 5, own  # the end of a run, which takes more or less by chance


def test_the_metrics_of_a_step_cost_some_two_dozen_calls(calls):
    # What is called by every step: lines of progress and of the metrics file are due by time.
    each = {w: n for w, n in calls["actorflow-metrics"].items() if n >= 1.0}
    assert sum(each.values()) <= 28, each
