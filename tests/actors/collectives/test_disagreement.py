import threading
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from meetings import call, placed, type_of

from actors.collectives import handshake
from actors.collectives.segments import ArrivalLine
from actors.collectives.shared_memory import SharedMemory
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.placement import Mesh
from compiler.contract.types import DType

ROWS = 8


def bind(communicator, order=0, size=ROWS, by="sum", dtype=DType.FLOAT32, **options):
    """Bind an all-reduce over two ranks; return its array and its launch."""
    array = placed(communicator, np.zeros(size, dtype.value))
    type_ = type_of(dtype, array)
    ranks = communicator.mesh.num_ranks
    asked = call("all_reduce", type_, type_, order, num_ranks=ranks, by=by, **options)
    return array, communicator.bind(asked, (array,), (array,))


def failures(together, ranks, do, **options):
    """Return what each rank raised."""
    with pytest.raises(PeerFailed):
        together((ranks,), do, **options)
    return {rank: str(error) for rank, error in together.threads.errors.items()}


@pytest.mark.parametrize(
    ("other", "theirs"),
    [
        ({"size": 9}, "all_reduce 0 of float32[9] by sum (model.py:1)"),
        ({"by": "max"}, "all_reduce 0 of float32[8] by max (model.py:1)"),
        ({"dtype": DType.INT32}, "all_reduce 0 of int32[8] by sum (model.py:1)"),
        ({"order": 1}, "all_reduce 1 of float32[8] by sum (model.py:1)"),
        ({"where": "model.py:2"}, "all_reduce 0 of float32[8] by sum (model.py:2)"),
    ],
    ids=["size", "by", "dtype", "order", "swapped"],
)
def test_ranks_that_would_meet_for_something_else_are_refused_by_name(together, other, theirs):
    def do(communicator):
        bind(communicator, **(other if communicator.rank == 1 else {}))
        communicator.ready()

    said = failures(together, 3, do)
    assert set(said) == {0, 1, 2}
    expected = f"rank 1 has {theirs} where rank 0 has all_reduce 0 of float32[8] by sum"
    assert all([text.startswith(expected) for text in said.values()])
    assert all(["run the same script" in text for text in said.values()])


def test_a_rank_with_fewer_collectives_is_refused(together):
    def do(communicator):
        for order in range(2 - communicator.rank):
            bind(communicator, order)
        communicator.ready()

    said = failures(together, 2, do)
    assert "rank 1 has no further collective where rank 0 has all_reduce 1 of" in said[0]
    assert said[0] == said[1]


def test_collectives_of_two_programs_may_have_one_order(together):
    def do(communicator):
        found = [bind(communicator, 0, actor=actor) for actor in ("all_reduce", "evaluate.it")]
        communicator.ready()
        for value, (array, meet) in enumerate(found):
            array[...] = value + 1
            meet()
        return [array.max() for array, _ in found]

    assert together((2,), do) == [[2, 4], [2, 4]]


def test_who_comes_to_another_collective_is_told_apart(together):
    """Each runs its collectives in another order, though both have the same ones."""

    def do(communicator):
        meets = [bind(communicator, order)[1] for order in range(2)]
        communicator.ready()
        meets[communicator.rank]()

    said = failures(together, 2, do)
    by_mismatch = [text for text in said.values() if " runs all_reduce" in text]
    assert by_mismatch
    assert len(said) == 2


def test_who_skips_a_firing_is_told_apart(together):
    def do(communicator):
        first, second = [bind(communicator, order)[1] for order in range(2)]
        communicator.ready()
        first()
        if communicator.rank == 0:
            second()
        else:
            second.count.value = 1  # as if it had met for it before
            second()

    said = failures(together, 2, do)
    assert len(said) == 2
    assert any(["runs firing" in text for text in said.values()])


def test_a_deadline_names_who_did_not_come_and_where(together):
    def do(communicator):
        _, meet = bind(communicator, where="loss at train.py:7")
        communicator.ready()
        if communicator.rank != 2:
            meet()

    said = failures(together, 3, do, deadline_s=0.1)
    assert set(said) == {0, 1}
    text = " did not arrive within 0.1 s where rank "
    assert all(
        [f"rank 2{text}" in s and "(loss at train.py:7), firing 0" in s for s in said.values()]
    )


def test_whoever_gives_up_wakes_all_who_wait_on_any_axis(together):
    waiting, chosen = threading.Barrier(4), {}

    def do(communicator):
        array = placed(communicator, np.zeros(ROWS, np.float32))
        type_ = type_of(DType.FLOAT32, array)
        group = "data" if communicator.rank in (0, 2) else "model"
        for order, name in enumerate(("data", "model")):
            asked = call("all_reduce", type_, type_, order, group=name, num_ranks=2, by="sum")
            meet = communicator.bind(asked, (array,), (array,))
            chosen[communicator.rank, name] = meet
        communicator.ready()
        waiting.wait()
        if communicator.rank == 3:
            communicator.abort("the loss is not finite at train.py:9")
        chosen[communicator.rank, group]()

    with pytest.raises(PeerFailed):
        together((2, 2), do, deadline_s=3600)
    said = {rank: str(error) for rank, error in together.threads.errors.items()}
    assert set(said.values()) == {"rank 3 aborted the run: the loss is not finite at train.py:9"}


def test_who_is_woken_blames_the_rank_that_was_missed_and_not_the_one_that_missed_it(together):
    """Of three ranks the last never comes; one of the others finds that out first."""

    def do(communicator):
        _, meet = bind(communicator)
        communicator.ready()
        if communicator.rank < 2:
            meet()

    said = failures(together, 3, do, deadline_s=0.1)
    errors = together.threads.errors
    assert {*said} == {0, 1}
    assert [errors[rank].rank for rank in (0, 1)] == [2, 2]


def come_by_hand(communicator):
    """Come to a meeting as the second rank, uncounted; return the line of the first one."""
    waits, own = [
        ArrivalLine.from_address(board.line(0)) for board in communicator._boards.values()
    ]
    while not waits.arrivals:
        pass
    own.came_to[1] = waits.came_to[1]
    own.arrived = 1
    return waits


def test_who_ends_after_it_came_and_before_it_was_counted_has_come(together):
    """Else who waits for it would find nobody missing, and wait for ever."""

    def do(communicator):
        _, meet = bind(communicator)
        communicator.ready()
        return meet() if communicator.rank == 0 else come_by_hand(communicator)

    together((2,), do, deadline_s=0.3)


def test_who_gave_up_before_all_were_ready_meets_nobody(together):
    def do(communicator):
        _, meet = bind(communicator)
        if communicator.rank == 1:
            communicator.abort("no data")
        communicator.ready()
        meet()

    said = failures(together, 2, do)
    assert set(said.values()) == {"rank 1 aborted the run: no data"}


def test_the_first_reason_is_the_one_that_all_tell(together):
    gone = threading.Event()

    def do(communicator):
        _, meet = bind(communicator)
        communicator.ready()
        if communicator.rank == 0:
            gone.wait()
        communicator.abort(f"reason of {communicator.rank}" + "!" * 10_000)
        gone.set()
        meet()

    said = failures(together, 2, do)
    assert {text[:41] for text in said.values()} == {"rank 1 aborted the run: reason of 1!!!!!!"}


SHARING = "share memory for collectives"


def bind_and_be_ready(communicator):
    bind(communicator)
    communicator.ready()


def test_ranks_of_another_mesh_or_host_are_refused(together):
    def meshes(rank, mesh):
        return replace(mesh, names=("model",)) if rank == 1 else mesh

    def tells(rank, name, value):
        if rank == 1 and name == SHARING:
            version, (host, *others), *rest = value
            value = version, (f"not {host}", *others), *rest
        return value

    said = failures(together, 2, lambda communicator: communicator.ready(), meshes=meshes)
    assert all(["rank 1 has a mesh of model=2, rank 0 one of data=2" in s for s in said.values()])
    said = failures(together, 2, lambda communicator: communicator.ready(), tells=tells)
    assert all(["rank 1 runs on another host" in text for text in said.values()])


def test_another_version_is_refused(together):
    def tells(rank, name, value):
        return (handshake.FORMAT + 1, *value[1:]) if value and rank == 1 else value

    said = failures(together, 2, bind_and_be_ready, tells=tells)
    assert all(["run the same version on all ranks" in text for text in said.values()])


def test_memory_that_cannot_be_mapped_is_said_by_all(together):
    def tells(rank, name, value):
        if rank == 1 and name == SHARING:
            version, (host, pid, ((fd, size), *others), *rest) = value
            value = version, (host, pid, ((fd, size + 4096), *others), *rest)
        return value

    said = failures(together, 2, bind_and_be_ready, tells=tells)
    assert all([text.startswith("rank 0 cannot map the memory") for text in said.values()])
    assert len(said) == 2


def test_several_ranks_need_a_compiler_and_a_place_in_the_mesh(native_toolchain):
    mesh = Mesh(("data",), (2,))
    with raises(DeviceError):
        SharedMemory(0, mesh, None, None)
    with raises(DeviceError):
        SharedMemory(2, mesh, None, native_toolchain)


def test_a_reason_that_is_no_text_is_told_and_wakes_the_others(together):
    """Names of files may hold bytes that are none."""

    def do(communicator):
        _, meet = bind(communicator)
        communicator.ready()
        if communicator.rank == 1:
            communicator.abort("cannot read 'caf\udce9.bin'")
        meet()

    said = failures(together, 2, do, deadline_s=3600)
    assert {*said.values()} == {"rank 1 aborted the run: cannot read 'caf?.bin'"}


def test_a_meeting_that_all_came_to_is_over_well_though_one_gave_up_after_it(together):
    """Who is late to see that all were there would else end another step than the others."""

    def do(communicator):
        _, meet = bind(communicator)
        communicator.ready()
        if communicator.rank == 0:
            return meet()
        # Both have come, and the run is given up since.
        come_by_hand(communicator).arrivals = 2 * 2 + 1
        return None

    together((2,), do, deadline_s=3600)


def test_nobody_is_counted_once_the_run_is_given_up(together):
    """Or a meeting might look complete to some, of which others were told that it is given up."""
    counted = []

    def do(communicator):
        _, meet = bind(communicator)
        communicator.ready()
        communicator.abort("no data")
        try:
            meet()
        finally:
            counted.append(ArrivalLine.from_address(communicator._boards[0].line(0)).arrivals)

    failures(together, 2, do)
    assert counted == [1, 1]
