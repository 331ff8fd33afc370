"""Which snapshots become checkpoints: the same ones on all ranks."""

import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from rank_threads import RankThreads

from actorflow.checkpoint.errors import Every
from actorflow.distributed.process_group import ProcessGroup
from actorflow.run.checkpoint_port import WRITER_NICENESS, CheckpointPort
from actorflow.run.saving import CheckpointScheduler, RunContext
from compiler.contract.placement import Mesh


class Clocked:
    """A saver whose period is over when `is_over` says so."""

    is_over = False

    def is_due(self, step):
        return self.is_over

    def keeps(self, step):
        return False

    def save_with(self, pieces, votes, rank):
        """Save with others."""


class Asking:
    """A run of several ranks that notes who asks for a checkpoint."""

    def __init__(self, rank, asked):
        self.ask_checkpoint = lambda: asked.append(rank)


@pytest.fixture
def ranks():
    """Return what makes the schedulers of two ranks, and what they asked for."""
    plan = SimpleNamespace(mesh=Mesh(("data",), (2,)), state=(), actors=())
    settings = SimpleNamespace(rank_seconds=1.0)

    def make(every, first_step=0):
        threads, asked, savers = RankThreads(2), [], [Clocked(), Clocked()]

        def one(rank):
            context = RunContext(
                group=ProcessGroup(rank, threads.gather(rank)), settings=settings,
                first_step=first_step, saver=savers[rank],
            )  # fmt: skip
            return CheckpointScheduler(plan, Every.parse(every), context, Asking(rank, asked))

        return *threads.run(one), savers, asked

    return make


@pytest.mark.parametrize(
    ("first", "snapshots", "due"),
    [(0, range(1, 10), [3, 6, 9]), (4, range(5, 14, 3), [8, 11]), (2, [5, 8, 11], [5, 8, 11])],
)
def test_a_period_in_steps_is_counted_alike_on_all_ranks(ranks, first, snapshots, due):
    one, other, savers, asked = ranks(3, first)
    savers[0].is_over = True  # whatever the first rank's saver thinks
    for keeping in (one, other):
        assert [step for step in snapshots if keeping.is_due(step)] == due
    assert not asked


def test_by_time_the_first_rank_asks_until_a_step_is_told(ranks):
    one, other, savers, asked = ranks("5s")
    savers[1].is_over = True  # whatever another rank's saver thinks
    assert not one.is_due(4)
    assert not asked
    savers[0].is_over = True
    assert not one.is_due(8)
    assert not other.is_due(8)
    assert asked == [0]
    one.schedule(13)
    assert not one.is_due(12)
    assert asked == [0], "the answer is there"
    assert one.is_due(16), "the first snapshot from step 13 on"
    assert not one.is_due(20)
    assert asked == [0, 0]


def test_a_rank_that_is_late_saves_all_that_was_told(ranks):
    _, other, _, _ = ranks("5s")
    other.schedule(13)
    other.schedule(21)
    assert [step for step in range(4, 40, 4) if other.is_due(step)] == [16, 24]


def test_what_keeps_nothing_has_nothing_due():
    keeping = CheckpointScheduler(None, None, RunContext(settings=None), None)
    assert not keeping.is_due(5)
    assert not keeping.needs_others
    keeping.save(5, {}, lambda step: {})
    keeping.close()


def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_the_thread_that_writes_checkpoints_gives_way_to_those_that_step():
    seen, staged = [], {"step": np.array(7), "w": np.ones((2, 3), np.float32)}
    port = CheckpointPort(
        lambda step, arrays: seen.append((step, niceness())),
        lambda step: True,
        last_saved=0,
        stop=lambda: None,
    )
    write = port.bind((staged,))
    assert not staged["w"].any(), "memory that nobody has touched costs the first snapshot faults"

    def write_two():
        for step in (7, 8):
            staged["step"][()] = step
            write()

    before = niceness()
    writer = threading.Thread(target=write_two)
    writer.start()
    writer.join()
    nicer = min(19, before + WRITER_NICENESS)
    assert seen == [(7, nicer), (8, nicer)]
    assert niceness() == before
