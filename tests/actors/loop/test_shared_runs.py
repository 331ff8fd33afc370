"""Loops of several ranks that are granted, stopped and aborted together."""

import threading

import pytest
from ranks_in_process import at_once, joined

from actorflow.distributed.agreement import WINDOW_STEPS
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.messages import StepsGranted
from actors.loop.dispatch import LoopOptions
from actors.loop.loop import Loop
from actors.machine.errors import ActorFailed
from compiler.contract.errors import PeerFailed

PATIENCE = 60


class Meeting:
    """A collective of all ranks, as a kernel; `fails` raises on a rank at a step."""

    def __init__(self, num_ranks):
        self._barrier = threading.Barrier(num_ranks)
        self.abort = self._barrier.abort

    def kernel(self, rank, fails):
        steps = iter(range(1, 1 << 30))

        def meet(inputs, outputs):
            if (rank, next(steps)) == fails:
                raise RuntimeError("a kernel of this rank")
            self._barrier.wait(PATIENCE)
            outputs[0][:] = inputs[0]

        return meet


def train(pipeline, bodies, member, meeting, *, fails=None, asks=lambda run, step: None):
    """Run a plan until it is stopped or fails; return the steps that its sink saw."""
    seen, began = [], threading.Event()

    def log(tokens):
        assert began.wait(PATIENCE)
        assert tokens[0]["x"][0] == len(seen)
        seen.append(len(seen))
        run.report_data_ready(len(seen))
        asks(run, len(seen))

    bound, _ = pipeline(bodies.Counting(), meeting.kernel(member.rank, fails), log)
    with Loop(bound, LoopOptions(window=0)) as loop:

        def abort(error):
            loop.abort(error)
            meeting.abort()

        def obey(message):
            if isinstance(message, StepsGranted):
                loop.grant(message.steps, is_last=message.is_last)

        loop.admit(1 << 20)
        run = DistributedRun(member, 0, obey=obey, abort=abort)
        run.begin()
        began.set()
        try:
            assert loop.wait(PATIENCE)
        except ActorFailed as error:
            member.fail(error, op=error.op, line=error.source)
            if member.failure is not None and member.failure.rank != member.rank:
                raise member.failure from error
            raise
        run.ended(len(seen))
    return len(seen)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_stop_that_one_rank_asks_for_ends_all_at_one_step(pipeline, bodies, num_ranks):
    def asks(run, step):
        if step == 10:
            run.ask_stop("enough")

    with joined(num_ranks) as (job, members):
        meeting = Meeting(num_ranks)
        first, *others = members
        steps = at_once(
            lambda: train(pipeline, bodies, first, meeting, asks=asks),
            *[lambda m=m: train(pipeline, bodies, m, meeting) for m in others],
        )
        assert len(set(steps)) == 1, steps
        assert 10 <= steps[0] <= 10 + 2 * WINDOW_STEPS
        assert job.coordinator.failure is None


def test_a_kernel_that_raises_on_one_rank_ends_the_others_within_a_collective(pipeline, bodies):
    with joined(3) as (job, members):
        meeting = Meeting(3)
        errors = at_once(
            *[lambda m=m: train(pipeline, bodies, m, meeting, fails=(1, 6)) for m in members]
        )
        assert isinstance(errors[1], ActorFailed)
        for error in (errors[0], errors[2]):
            assert isinstance(error, PeerFailed)
            assert error.rank == 1
            assert "a kernel of this rank" in str(error)
        assert job.coordinator.failure.op == errors[1].op
