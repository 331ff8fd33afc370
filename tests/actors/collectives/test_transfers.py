import threading

import numpy as np
import pytest
from error_texts import raises
from meetings import call, placed, site, type_of

from compiler.contract.collective import Collective
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.types import DType, TensorType

TOKEN = TensorType(DType.UINT8, (0,))
SMALL, LARGE = 100, 9000
BATCHES = 200


def end(communicator, op, peer, array, order=0, **options):
    """Bind one end of a transfer along "stage"; a receive waits for two tokens."""
    coordinate = communicator.mesh.axis("stage")
    attrs = {
        "group": "stage", "order": order, "num_ranks": communicator.mesh.shape[coordinate],
        "peer": peer, "is_up": True,
    } | options  # fmt: skip
    token, type_ = np.zeros(0, np.uint8), type_of(DType.FLOAT32, array)
    if op == "send":
        asked = Collective.of(op, attrs, (type_,), (TOKEN,), site("made at model.py:1", "send", 1))
        return communicator.bind(asked, (array,), (token,))
    where = site("read at model.py:9", "receive", 3)
    asked = Collective.of(op, attrs, (TOKEN, TOKEN), (type_,), where)
    return communicator.bind(asked, (token, token), (array,))


def space(communicator, size):
    return placed(communicator, np.zeros(size, np.float32))


@pytest.mark.parametrize("size", [0, SMALL, LARGE], ids=["empty", "aside", "in place"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_what_stages_send_arrives_though_each_waits_on_all_its_sides(together, stages, size):
    """Batches go up and what comes of them goes down; every end has a thread of its own."""

    def do(communicator):
        rank = communicator.rank
        up = [space(communicator, size), space(communicator, size)]
        down = [space(communicator, size), space(communicator, size)]
        ends = {}
        if rank > 0:
            ends["in up"] = end(communicator, "receive", rank - 1, up[0], rank - 1)
            ends["out down"] = end(communicator, "send", rank - 1, down[1], stages + rank)
        if rank < stages - 1:
            ends["out up"] = end(communicator, "send", rank + 1, up[1], rank)
            ends["in down"] = end(communicator, "receive", rank + 1, down[0], stages + rank + 1)
        communicator.ready()
        errors = []

        def forward():
            for batch in range(BATCHES):
                up[0][...] = batch if rank == 0 else -1
                ends.get("in up", int)()
                if (up[0] != batch + rank).any():
                    errors.append((rank, batch))
                up[1][...] = up[0] + 1
                ends.get("out up", int)()

        def backward():
            for batch in range(BATCHES):
                down[0][...] = 2 * batch if rank == stages - 1 else -1
                ends.get("in down", int)()
                if (down[0] != 2 * batch + stages - 1 - rank).any():
                    errors.append((rank, batch, "down"))
                down[1][...] = down[0] + 1
                ends.get("out down", int)()

        threads = [threading.Thread(target=side) for side in (forward, backward)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    assert together((stages,), do, names=("stage",), deadline_s=20) == [[]] * stages


def test_all_may_meet_along_the_axis_that_two_send_along(together):
    def do(communicator):
        rank, mesh = communicator.rank, communicator.mesh
        stage = mesh.coordinates(rank)[1]
        array, total = space(communicator, LARGE), space(communicator, SMALL)
        send = end(communicator, "receive" if stage else "send", 1 - stage, array)
        type_ = type_of(DType.FLOAT32, total)
        asked = call("all_reduce", type_, type_, 1, group="stage", num_ranks=2, by="sum")
        reduce = communicator.bind(asked, (total,), (total,))
        communicator.ready()
        for firing in range(5):
            array[...] = 0 if stage else 10 * rank + firing
            send()
            total[...] = array[0]
            reduce()
            assert (total == 2 * (10 * (rank - stage) + firing)).all()

    together((2, 2), do, names=("data", "stage"))


def test_ends_that_do_not_fit_are_refused_by_name(together):
    def do(communicator):
        size = SMALL + communicator.rank
        op = ("send", "receive")[communicator.rank]
        end(communicator, op, 1 - communicator.rank, space(communicator, size), 7)
        communicator.ready()

    with raises(PeerFailed):
        together((2,), do, names=("stage",))


def test_an_end_without_the_other_is_refused(together):
    def do(communicator):
        if communicator.rank == 0:
            end(communicator, "send", 1, space(communicator, SMALL))
        communicator.ready()

    with raises(PeerFailed):
        together((2,), do, names=("stage",))


def test_who_waits_for_a_neighbour_is_told_which_one(together):
    def do(communicator):
        if communicator.rank < 2:
            op = ("send", "receive")[communicator.rank]
            meet = end(communicator, op, 1 - communicator.rank, space(communicator, SMALL))
        communicator.ready()
        if communicator.rank == 1:
            meet()

    with raises(PeerFailed):
        together((3,), do, names=("stage",), deadline_s=0.1)


def test_what_cannot_be_sent_is_refused_when_it_is_bound(together):
    def do(communicator):
        with raises(DeviceError):
            end(communicator, "send", 3, np.zeros(3, np.float32))
        with raises(DeviceError):
            end(communicator, "send", 0, np.zeros(3, np.float32))
        with raises(DeviceError):
            end(communicator, "receive", 1, np.zeros(LARGE, np.float32))

    def on_first(communicator):
        if communicator.rank == 0:
            do(communicator)

    together((3,), on_first, names=("stage",))


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["aside", "in place"])
def test_passes_of_two_batches_meet_at_the_same_time(together, size):
    """Which of the two a rank comes to first is its own affair."""
    found = together((2,), _two_ways(size), names=("stage",))
    for arrays in found:
        for is_back, array in enumerate(arrays):
            assert (array == 2 * (BATCHES - 1 + is_back) + 1).all()


def _two_ways(size):
    def do(communicator):
        rank, bound = communicator.rank, []
        for order in (0, 1):
            array = space(communicator, size)
            type_ = type_of(DType.FLOAT32, array)
            attrs = {"group": "stage", "num_ranks": 2, "by": "sum"}
            asked = call("all_reduce", type_, type_, order, stream=5 * order, **attrs)
            bound.append((order, array, communicator.bind(asked, (array,), (array,))))
        communicator.ready()

        def run(order, array, launch):
            for batch in range(BATCHES):
                array[...] = batch + order + rank
                launch()

        threads = [threading.Thread(target=run, args=row) for row in bound]
        for thread in threads[:: 1 if rank else -1]:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [array.copy() for _, array, _ in bound]

    return do
