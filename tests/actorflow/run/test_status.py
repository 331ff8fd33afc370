import gc
import json
import math
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from error_texts import raises

from actorflow.distributed.rank_waits import RankWaits
from actorflow.run.callback_calls import CallbackCalls
from actorflow.run.status import (
    ActorStatus,
    Listener,
    RankStatus,
    Status,
    StatusError,
    StatusWriter,
    read_status,
)
from actors.machine.history import ActorStatistics, Statistics, StreamStatistics, Waits
from compiler.contract.placement import HOST, Memory
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Arena

PLAN = Plan(
    "demo",
    (),
    (Arena(HOST, Memory.HOST, 3000, 64), Arena(HOST, Memory.HOST, 1000, 64)),
    *[()] * 8,
    "",
    "",
    (),
)


def statistics(elapsed_ns, busy_ns, firings):
    actor = ActorStatistics(
        "step", "compute", firings, busy_ns, 0, (Waits("input", "batch", 3), Waits("self", "", 1))
    )
    return Statistics(elapsed_ns, (actor,), (StreamStatistics("compute", busy_ns, 0),))


class Run:
    """A run on a clock of its own, with the writer of its status."""

    def __init__(self, folder, first_step=0, **options):
        self.now, self.asked, self.said = 0.0, 0, []
        self.counts = (0, 0, 0)
        self.path = folder / "status.json"
        self.writer = StatusWriter(
            self.path, PLAN, first_step=first_step, total_steps=100, clock=lambda: self.now,
            time_of_day=lambda: 1000.0 + self.now, report=self.said.append, **options,
        )  # fmt: skip

    def statistics(self):
        self.asked += 1
        return statistics(*self.counts)

    def read(self):
        return read_status(self.path.parent)


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path, first_step=10)
    made.writer.start(made.statistics)
    return made


def test_a_run_has_a_status_before_its_first_step(run):
    assert run.read() == Status(
        job="demo", pid=os.getpid(), host=socket.gethostname(), state="running",
        written_at_s=1000.0, elapsed_s=0.0, step=10, total_steps=100, steps_per_s=None, loss=None,
        arena_bytes=4000, streams={"compute": 0.0},
        actors=(ActorStatus("step", "compute", 0, 0.0, 0.0, {"input batch": 3, "self": 1}),),
    )  # fmt: skip


def test_a_status_has_the_ranks_of_the_plan_and_the_epoch(tmp_path):
    run = Run(tmp_path)
    run.writer.start(run.statistics, 3)
    assert (run.read().ranks, run.read().epoch) == (PLAN.mesh.num_ranks, 3)


def test_a_status_has_what_each_rank_waits_and_who_is_behind(tmp_path):
    run, waits = Run(tmp_path), RankWaits(("0 (nodeA)", "1 (nodeB)"))
    run.writer.start(run.statistics, waits=waits)
    assert (run.read().by_rank, run.read().rank_behind) == ((), None)
    waits.shares, waits.behind = (0.4, 0.01), 1
    run.writer.finish("finished")
    assert run.read().by_rank == (RankStatus("0 (nodeA)", 0.4), RankStatus("1 (nodeB)", 0.01))
    assert run.read().rank_behind == 1
    waits.hosts = ()
    run.writer.finish("finished")
    assert {one.host for one in run.read().by_rank} == {socket.gethostname()}


def test_a_rank_that_is_behind_is_told_once(tmp_path):
    said, waits = [], RankWaits()
    waits.shares, notice = (0.4, 0.01), SimpleNamespace(notice=said.append, step=lambda *_: None)
    stopper = SimpleNamespace(call=lambda *_: None)
    listener = Listener(notice, None, None, 0, stopper, CallbackCalls([], stopper))
    listener.start(lambda: None, waits=waits)
    for step, behind in enumerate([None, 1, 1, None, 1], 1):
        waits.behind = behind
        listener(step, {})
    text = "rank 1 is behind: it waits 1% of the time for other ranks, and they 40%"
    assert said == [text]


def test_rates_and_shares_are_those_of_the_last_interval(run):
    run.now, run.counts = 2.0, (2_000, 500, 4)
    run.writer.step(14, {"loss": 1.5})
    run.now, run.counts = 4.0, (4_000, 2_300, 10)
    run.writer.step(20, {"loss": 1.25, "other": [1]})
    status = run.read()
    assert (status.step, status.loss, status.elapsed_s) == (20, 1.25, 4.0)
    assert status.steps_per_s == 3.0
    assert status.streams == {"compute": 0.9}
    assert status.actors[0].busy_share == 0.9
    assert status.actors[0].ms_per_firing == 2_300 / 10 / 1e6


def test_it_is_written_about_once_a_second_and_asks_for_nothing_in_between(run):
    for step in range(11, 1011):
        run.now += 0.01
        run.writer.step(step, {"loss": 1.0})
    assert 9 <= run.asked <= 12


def test_the_last_status_is_of_the_whole_run(run):
    run.now, run.counts = 5.0, (5_000, 500, 5)
    run.writer.step(15, {"loss": 1.0})
    run.now, run.counts = 5.1, (10_000, 5_000, 10)
    run.writer.step(30, {"loss": 0.5})
    run.now = 10.0
    run.writer.finish("finished")
    status = run.read()
    assert (status.state, status.step, status.loss) == ("finished", 30, 0.5)
    assert (status.steps_per_s, status.streams) == (2.0, {"compute": 0.5})


def test_a_run_that_never_began_has_no_status(tmp_path):
    Run(tmp_path).writer.finish("failed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_survives_the_file(run, loss):
    run.now = 2.0
    run.writer.step(11, {"loss": loss})
    assert str(run.read().loss) == str(loss)
    json.loads(run.path.read_text(), parse_constant=pytest.fail)


def test_the_file_is_replaced_as_a_whole(run, monkeypatch):
    replaced = []
    monkeypatch.setattr("os.replace", lambda old, new: replaced.append((Path(old), new)))
    before = run.path.read_text()
    run.writer.finish("finished")
    ((partial, path),) = replaced
    assert (path, run.path.read_text()) == (run.path, before)
    assert partial.parent == path.parent
    assert json.loads(partial.read_text())["state"] == "finished"


def test_a_file_that_cannot_be_written_is_reported_once_and_tried_again(tmp_path):
    run = Run(tmp_path / "gone")
    run.writer.start(run.statistics)
    run.now = 5.0
    run.writer.step(1, {})
    (said,) = run.said
    assert said.startswith(f"{run.path} cannot be written (No such file or directory); the run")
    (tmp_path / "gone").mkdir()
    run.now = 10.0
    run.writer.step(2, {})
    assert run.read().step == 2
    assert len(run.said) == 1


def test_the_status_of_no_run_says_what_is_missing(tmp_path):
    with raises(StatusError):
        read_status(tmp_path / "nothing")
    with raises(StatusError):
        read_status(tmp_path)
    (tmp_path / "status.json").mkdir()
    with raises(StatusError):
        read_status(tmp_path)


WRONG = {
    "step": "many", "state": "asleep", "actors": 3, "streams": ["compute"], "loss": [],
    "pid": None, "total_steps": "x", "host": ..., "format": ...,
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_or_missing_value_is_damage(run, key):
    values = json.loads(run.path.read_text())
    if WRONG[key] is ...:
        del values[key]
    else:
        values[key] = WRONG[key]
    run.path.write_text(json.dumps(values))
    with raises(StatusError):
        run.read()


def test_any_cut_of_the_file_is_damage_and_never_another_exception(run):
    whole = run.path.read_bytes()
    for length in range(len(whole) - 1):
        with pytest.raises(StatusError, match="damaged"):
            Status.from_json(whole[:length])
    for text in (b"[]", b"3", b"null", b"\xff", b'{"format": 4}', b"[" * 100_000):
        with pytest.raises(StatusError, match="damaged"):
            Status.from_json(text)


def test_a_status_of_another_version_says_so(run):
    values = json.loads(run.path.read_text()) | {"format": 99}
    run.path.write_text(json.dumps(values))
    with raises(StatusError):
        run.read()


def test_a_status_without_an_end_or_a_loss_goes_through_the_file(run):
    status = replace(run.read(), total_steps=None, loss=None, steps_per_s=2.5)
    assert Status.from_json(status.to_json()) == status


def test_a_folder_that_belongs_to_another_run_by_now_is_not_written(tmp_path):
    owners = [True, False, False]
    run = Run(tmp_path, is_ours=lambda: owners.pop(0))
    run.writer.start(run.statistics)
    before = run.path.read_bytes()
    run.now = 5.0
    run.writer.step(1, {})
    run.writer.finish("finished")
    assert run.path.read_bytes() == before
    assert len(run.said) == 1
    assert "no longer that of the run" in run.said[0]


def test_a_write_costs_some_dozen_calls_and_a_step_between_two_writes_costs_one(run):
    def calls(act):
        seen = []
        gc.disable()  # or finalizers of what other tests left are counted
        sys.setprofile(lambda frame, event, _: seen.append(frame) if event == "call" else None)
        try:
            act()
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(seen)

    run.now = 2.0
    assert calls(lambda: run.writer.step(11, {"loss": 1.0})) <= 60
    assert calls(lambda: run.writer.step(12, {"loss": 1.0})) <= 3  # the lambda, and its clock
