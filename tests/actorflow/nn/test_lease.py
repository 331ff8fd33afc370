"""Leases on parameters: one owner at a time, one swap at the end, whatever interrupts it."""

import copy
import dis
import pickle
import sys
import threading

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.nn import lease as leases
from actorflow.nn.lease import (
    Claim,
    OpenLoop,
    ParameterStorage,
    assign_values,
    lease,
    leased,
    make_claim,
    newest,
)
from actors.machine import errors
from compiler.graph.graph import SourceLocation

ONE, TWO = (
    Claim("fit of job 'one'", SourceLocation("a.py", 1)),
    Claim("fit of job 'two'", SourceLocation("b.py", 2)),
)


def array(number):
    values = np.full(2, number, np.float32)
    values.flags.writeable = False
    return values


def cells_of(*numbers):
    cells = {name: ParameterStorage() for name in "abc"[: len(numbers)]}
    assign_values({cell: array(n) for cell, n in zip(cells.values(), numbers, strict=True)})
    return cells


def numbers_of(cells):
    return [float(a[0]) for a in newest(cells).values()]


class FakeRun:
    """Has every variable but `c`; `finished` is what a step made."""

    can_be_lost = False

    def __init__(self, **finished):
        self.finished = {name: array(number) for name, number in finished.items()}
        self.pending = {}
        self.is_over = False
        self.num_reads = 0

    def __contains__(self, name):
        return name in self.finished

    def may_have(self, name):
        return name in self

    def read(self, names):
        self.num_reads += 1
        return {name: {**self.finished, **self.pending}[name] for name in names}

    def write(self, values):
        self.pending = {**self.pending, **values}


def test_cells_that_a_run_trains_are_read_and_written_there_until_it_ends():
    cells = cells_of(0, 0)
    run = FakeRun(a=1, b=2)
    held = lease(cells, ONE)
    held.attach(run)
    assert numbers_of(cells) == [1, 2]
    assign_values({cells["a"]: array(7)})
    assert numbers_of(cells) == [7, 2]
    held.end({"a": array(8), "b": array(9)})
    assert numbers_of(cells) == [7, 9]  # what was written and not yet taken over is not lost
    run.finished = {}
    assert numbers_of(cells) == [7, 9]


def test_cells_that_the_run_does_not_have_keep_their_own_values():
    cells = cells_of(0, 0, 3)
    held = lease(cells, ONE)
    held.attach(FakeRun(a=1, b=2))
    assert numbers_of(cells) == [1, 2, 3]
    assign_values({cells["c"]: array(4)})
    assert numbers_of(cells) == [1, 2, 4]
    held.end({"a": array(5), "b": array(6)})
    assert numbers_of(cells) == [5, 6, 4]


def test_what_is_written_before_the_run_is_there_reaches_it():
    cells = cells_of(0, 0)
    held = lease(cells, ONE)
    assign_values({cells["b"]: array(5)})
    assert numbers_of(cells) == [0, 5]
    run = FakeRun(a=0, b=0)
    held.attach(run)
    assert {name: a[0] for name, a in run.pending.items()} == {"b": 5}


def test_a_second_owner_is_refused_with_both_lines_also_for_a_part():
    cells = cells_of(0, 0)
    held = lease(cells, ONE)
    held.attach(FakeRun(a=1, b=2))
    with raises(af.CompileError):
        lease({"y": ParameterStorage(), "x": cells["b"]}, TWO)
    with raises(af.CompileError):
        make_claim({"x": cells["b"]}, "what")
    held.end(None)
    assert lease(cells, TWO).claim is TWO


def test_a_lease_that_is_not_attached_yet_refuses_other_threads():
    cells, errors = cells_of(0), []
    lease(cells, ONE)

    def take():
        with raises(af.CompileError):
            lease(cells, TWO)
        errors.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert errors == [True]


def test_between_two_steps_the_values_come_home_once_and_another_may_train():
    cells = cells_of(0, 0)
    run = FakeRun(a=1, b=2)
    held = lease(cells, ONE, is_stepped=True)
    held.attach(run)
    held.end_step()
    assert held.begin_step()
    held.end_step()
    assert numbers_of(cells) == numbers_of(cells) == [1, 2]
    assert run.num_reads == 1
    assert not held.begin_step()
    assert held.left_by_name().keys() == {"a", "b"}
    assert lease(cells, TWO).claim is TWO


def test_during_a_step_other_threads_read_and_cannot_train():
    cells = cells_of(0, 0)
    held = lease(cells, ONE, is_stepped=True)
    held.attach(FakeRun(a=1, b=2))
    seen = []

    def other():
        seen.append(numbers_of(cells))
        with raises(af.CompileError):
            lease(cells, TWO)
        seen.append(held.begin_step())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [[1, 2], True]


def test_a_read_that_meets_the_beginning_of_a_step_does_not_end_the_lease():
    cells = cells_of(0, 0)
    held = lease(cells, ONE, is_stepped=True)

    class Slow(FakeRun):
        def read(self, names):
            values = super().read(names)
            assert held.begin_step()  # another thread was quicker
            self.finished = {"a": array(3), "b": array(4)}
            return values

    held.attach(Slow(a=1, b=2))
    held.end_step()
    assert numbers_of(cells) == [1, 2]
    assert held.left is None
    held.end({"a": array(3), "b": array(4)})
    assert numbers_of(cells) == [3, 4]


def test_a_run_that_was_cut_in_an_update_leaves_what_was_there_before():
    cells = cells_of(5, 6)
    held = lease(cells, ONE)
    run = FakeRun(a=1, b=2)
    run.read = lambda names: None
    held.attach(run)
    assert numbers_of(cells) == [5, 6]
    held.end(None)
    assert numbers_of(cells) == [5, 6]


def test_a_cell_that_is_copied_while_it_is_trained_has_the_newest_values_and_no_lease():
    cells = cells_of(0)
    held = lease(cells, ONE)
    held.attach(FakeRun(a=1))
    copies = [copy.deepcopy(cells["a"]), pickle.loads(pickle.dumps(cells["a"]))]
    held.end({"a": array(2)})
    for cell in copies:
        assert numbers_of({"a": cell}) == [1]
        assert cell.lease is None
        assert not cell.array.flags.writeable


def test_a_loop_over_a_run_that_is_over_holds_the_lease_until_it_ends():
    cells = cells_of(0)
    loop = OpenLoop()

    def outputs():
        with leased(cells, ONE, loop) as held:
            run = FakeRun(a=1)
            held.attach(run)
            yield 1
            run.is_over = True
            yield 2

    generator = loop.of(outputs())
    for _ in range(2):
        next(generator)
        assert numbers_of(cells) == [1]
        with raises(af.CompileError):
            lease(cells, TWO)
    generator.close()
    assert lease(cells, TWO).claim is TWO


def test_a_call_whose_run_is_over_is_over_for_other_threads_when_it_returns():
    cells, errors = cells_of(0), []
    run = FakeRun(a=1)

    def take():
        with raises(af.CompileError):
            lease(cells, TWO)
        errors.append(numbers_of(cells))

    with leased(cells, ONE) as held:
        held.attach(run)
        run.is_over = True
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert errors == [[1]]
    assert lease(cells, TWO).claim is TWO


# -- interrupts -----------------------------------------------------------------------------------


FILES = (leases.__file__, errors.__file__)


def interrupted(call, at):
    """Run a call and raise KeyboardInterrupt at place number `at` of leases and their lock.

    Places are where Python looks for signals: where a function begins, where a call has returned,
    where a loop goes round. Return whether it came so far.
    """
    count = 0

    def meet(frame):
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt

    def trace(frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        code = frame.f_code.co_code
        if event == "call" or (
            event == "opcode" and dis.opname[code[frame.f_lasti]].startswith("JUMP_BACKWARD")
        ):
            meet(frame)
        return trace

    def profile(frame, event, _):
        if frame.f_code.co_filename in FILES and event in ("return", "c_return"):
            meet(frame)

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return False


def every_interrupt(prepare):
    """For every place where an interrupt may come: prepare, run the call cut there, yield."""
    at, is_cut = 0, True
    while is_cut:
        at += 1
        fixture, call = prepare()
        is_cut = interrupted(call, at)
        yield fixture, is_cut
    assert at > 12


def whole_and_free(cells, old, new):
    """The cells have all old or all new values, and any thread can read, write and train them."""
    read = []
    thread = threading.Thread(target=lambda: read.append(numbers_of(cells)), daemon=True)
    thread.start()
    thread.join(30)
    came = numbers_of(cells)
    assert read == [came]
    assert came in (old, new)
    held = lease(cells, TWO)
    assert numbers_of(cells) == came
    held.end(None)
    assign_values({cell: array(9) for cell in cells.values()})
    assert numbers_of(cells) == [9] * len(cells)
    return came


def test_an_interrupt_anywhere_in_the_hand_back_loses_nothing():
    def prepare():
        cells = cells_of(1, 2, 3)
        held = lease(cells, ONE)
        run = FakeRun(a=4, b=5, c=6)
        held.attach(run)
        run.is_over = True
        return cells, lambda: held.end({"a": array(4), "b": array(5), "c": array(6)})

    for cells, _ in every_interrupt(prepare):
        assert whole_and_free(cells, [4, 5, 6], [4, 5, 6])


def test_an_interrupt_anywhere_in_a_load_loads_all_or_nothing():
    def prepare():
        cells = cells_of(1, 2, 3)
        arrays = {cell: array(i) for i, cell in enumerate(cells.values(), 4)}
        return cells, lambda: assign_values(arrays)

    came = [whole_and_free(cells, [1, 2, 3], [4, 5, 6]) for cells, _ in every_interrupt(prepare)]
    assert came == sorted(came)
    assert (came[0], came[-1]) == ([1, 2, 3], [4, 5, 6])


@pytest.mark.parametrize("is_stepped", [False, True])
def test_an_interrupt_anywhere_before_a_run_begins_leaves_nothing_leased(is_stepped):
    def prepare():
        cells = cells_of(1, 2)
        return cells, lambda: lease(cells, ONE, is_stepped=is_stepped)

    for cells, _ in every_interrupt(prepare):
        assert whole_and_free(cells, [1, 2], [1, 2])


def test_an_interrupt_anywhere_in_a_leased_block_leaves_the_newest_values():
    def prepare():
        cells = cells_of(1, 2)

        def call():
            run = FakeRun(a=3, b=4)
            with leased(cells, ONE) as held:
                try:
                    held.attach(run)
                finally:
                    run.is_over = True  # whoever opened it closes it

        return cells, call

    for cells, _ in every_interrupt(prepare):
        whole_and_free(cells, [1, 2], [3, 4])
