"""Collectives between GPUs that the host emulates, against numpy, each rank a thread."""

import threading
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from meetings import call, cut, parts, reduced, same_bits, type_of, values
from rank_threads import RankThreads

from actors.collectives.nccl import NcclCommunicator
from actors.device.cuda.device import CudaDevice
from actors.kernels.cuda.calls import NCCL_DTYPES
from actors.kernels.cuda.kernel import gpu_named
from actors.machine.protocol import DeviceFault
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.placement import Memory, Mesh
from compiler.contract.types import DType, TensorType, contiguous_strides

LARGE = 70_001
"""Elements of several chunks, a number that no number of ranks divides."""


class Rank:
    """A rank with its GPU: arrays lie there, and a collective is bound, and run as a chain."""

    def __init__(self, rank, mesh, gather, toolchain, gpu=None, kind=CudaDevice, **options):
        cuda = EmulatedCuda(LateSchedule(Random(rank)))
        index = rank if gpu is None else gpu
        driver = EmulatedDriver(cuda, toolchain, gpu_named("h200"), index)
        self.rank, self.device = rank, kind(driver, {})
        self.communicator = NcclCommunicator(rank, mesh, gather, self.device, **options)
        self.stream = self.device.make_stream("comm")

    def placed(self, dtype, array):
        type_ = type_of(dtype, array)
        block = self.device.allocate(array.nbytes, 256, Memory.DEVICE)
        strides = contiguous_strides(type_.shape, dtype.itemsize)
        view = self.device.view(block, 0, type_, strides)
        view_of = (view, block)  # the bytes go with the block
        if array.nbytes:
            self.device.write(view, array)
        return view_of

    def bound(self, asked, inputs, outputs):
        launch = self.communicator.bind(asked, inputs, outputs)
        (chain,) = self.device.bind_chain(self.stream, (launch,))
        return chain


@pytest.fixture
def together(native_toolchain):
    """Return what runs `do(rank)` on all ranks of a mesh at once, each with its GPU."""

    def run(count, do, gpus=None, kinds=None, hosts=None, **options):
        mesh, threads = Mesh(("data",), (count,)), RankThreads(count)

        def one(number):
            gpu = None if gpus is None else gpus[number]
            kind = CudaDevice if kinds is None else kinds[number]
            gather = threads.gather(number)
            own = options if hosts is None else {"host": hosts[number], **options}
            rank = Rank(number, mesh, gather, native_toolchain, gpu, kind, **own)
            try:
                return do(rank)
            finally:
                rank.communicator.close()

        return threads.run(one)

    return run


def test_ends_beside_one_use_its_communicators_when_it_is_closed_as_well(together):
    joined = []

    class Counted(CudaDevice):
        def join_communicator(self, *request):
            joined.append(request)
            return super().join_communicator(*request)

    def do(rank):
        first, found = rank.communicator, []
        view, _block = rank.placed(DType.FLOAT32, np.full(1023, 1.0, np.float32))
        asked = call("all_reduce", view.type, view.type, 0, num_ranks=2, by="sum")
        rank.bound(asked, (view,), (view,))
        first.ready()
        for _ in range(2):
            rank.communicator = first.beside()()
            chain = rank.bound(asked, (view,), (view,))
            rank.communicator.ready()
            first.close()
            chain()
            rank.device.synchronize()
            found.append({*rank.device.read(view).tolist()})
        return found

    assert together(2, do, kinds=[Counted, Counted]) == [[{2.0}, {4.0}]] * 2
    assert len(joined) == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_leaves_the_sum_on_every_rank(together, ranks):
    dtypes = (*NCCL_DTYPES, DType.BOOL)
    cases = [(dtype, by, size) for dtype in dtypes for by in ("sum", "max", "min")
             for size in (1, 1023)]  # fmt: skip
    cases.append((DType.FLOAT32, "sum", LARGE))

    def do(rank):
        bound = []
        for order, (dtype, by, size) in enumerate(cases):
            view, block = rank.placed(dtype, values(dtype, (size,), (order, rank.rank)))
            asked = call("all_reduce", view.type, view.type, order, num_ranks=ranks, by=by)
            bound.append((view, block, rank.bound(asked, (view,), (view,))))
        rank.communicator.ready()
        for _, _, chain in bound:
            chain()
        rank.device.synchronize()
        return [rank.device.read(view) for view, *_ in bound]

    found = together(ranks, do)
    for order, (dtype, by, size) in enumerate(cases):
        terms = [values(dtype, (size,), (order, rank)) for rank in range(ranks)]
        for rank in range(ranks):
            wanted = reduced(dtype, terms, by)
            assert same_bits(dtype, found[rank][order], wanted), (dtype, by, size, rank)


def test_ranks_on_several_hosts_meet_by_ids_that_their_gathers_bring(together):
    def do(rank):
        view, block = rank.placed(DType.FLOAT32, np.full(5, rank.rank + 1, np.float32))
        asked = call("all_reduce", view.type, view.type, 0, num_ranks=3, by="sum")
        chain = rank.bound(asked, (view,), (view,))
        rank.communicator.ready()
        chain()
        rank.device.synchronize()
        summed = rank.device.read(view).tolist()
        del block
        return summed

    assert together(3, do, hosts=("nodeA", "nodeA", "nodeB")) == [[6.0] * 5] * 3


def run_moves(together, ranks, op, dtype, whole_of, attrs_of):
    """Run one collective twice; `whole_of` has what a rank gives and must have then."""

    def do(rank):
        given, wanted = whole_of(rank.rank)
        view, one = rank.placed(dtype, given)
        target, other = rank.placed(dtype, np.zeros_like(wanted))
        asked = call(op, view.type, target.type, num_ranks=ranks, **attrs_of(rank.rank))
        chain = rank.bound(asked, (view,), (target,))
        rank.communicator.ready()
        for _ in range(2):
            rank.device.write(target, np.zeros_like(wanted))
            chain()
            rank.device.synchronize()
            assert same_bits(dtype, rank.device.read(target), wanted), rank.rank
        del one, other

    together(ranks, do)


MOVED = (DType.FLOAT32, DType.BFLOAT16, DType.INT16, DType.BOOL)


@pytest.mark.parametrize("shape", [(6, 5), (7, 3), (3, 9001)], ids=str)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_all_sizes_are_gathered(together, ranks, dtype, shape):
    whole = values(dtype, shape, 3)
    run_moves(
        together, ranks, "all_gather", dtype,
        lambda rank: (cut(whole, 0, ranks, rank), whole),
        lambda rank: {"axis": 0, "rows": shape[0]},
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(6, 5), (7, 3), (5, 9001)], ids=str)
@pytest.mark.parametrize("by", ["sum", "max"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_all_sizes_are_reduced_to_their_ranks(together, ranks, by, shape):
    terms = [values(DType.FLOAT32, shape, (4, rank)) for rank in range(ranks)]
    total = reduced(DType.FLOAT32, terms, by)

    def attrs(rank):
        first, last = parts(shape[0], ranks)[rank]
        return {"axis": 0, "rows": last - first, "by": by}

    run_moves(
        together, ranks, "reduce_scatter", DType.FLOAT32,
        lambda rank: (terms[rank], cut(total, 0, ranks, rank)), attrs,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [6, 7, 9001])
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_exchange_rows_for_blocks(together, ranks, dtype, rows):
    whole = values(dtype, (ranks, rows, 5), 3)
    run_moves(
        together, ranks, "all_to_all", dtype,
        lambda rank: (cut(whole, 1, ranks, rank), cut(whole, 0, ranks, rank)),
        lambda rank: {"axis": 1, "rows": rows, "to_axis": 0, "to_rows": 1},
    )  # fmt: skip


def test_what_is_sent_is_received(together):
    sent = values(DType.FLOAT32, (LARGE,), 1)
    token = TensorType(DType.UINT8, (0,))

    def do(rank):
        attrs = {"num_ranks": 2, "peer": 1 - rank.rank}
        view, block = rank.placed(DType.FLOAT32, sent if rank.rank == 0 else np.zeros_like(sent))
        if rank.rank == 0:
            chain = rank.bound(call("send", view.type, token, **attrs), (view,), (view,))
        else:
            chain = rank.bound(call("receive", token, view.type, **attrs), (view,), (view,))
        rank.communicator.ready()
        chain()
        rank.device.synchronize()
        return rank.device.read(view), block

    for array, _ in together(2, do):
        assert array.tobytes() == sent.tobytes()


def reduction(rank, order=0, size=4, **attrs):
    """Return the chain of an all-reduce of ones, and what it works on."""
    view, block = rank.placed(DType.FLOAT32, np.ones(size, np.float32))
    attrs = {"num_ranks": rank.communicator.mesh.num_ranks, "by": "sum"} | attrs
    asked = call("all_reduce", view.type, view.type, order, **attrs)
    return rank.bound(asked, (view,), (view,)), view, block


def test_ranks_with_other_collectives_are_refused_on_all(together):
    def do(rank):
        _, _, block = reduction(rank, size=4 + rank.rank)
        with pytest.raises(PeerFailed, match=r"rank 1 has all_reduce 0 of float32\[5\] by sum"):
            rank.communicator.ready()
        return block

    together(2, do)


def test_two_ranks_of_one_gpu_are_refused_as_by_nccl(together):
    def do(rank):
        _, _, block = reduction(rank)
        with pytest.raises(DeviceError, match="two ranks have one GPU: those of the ranks are"):
            rank.communicator.ready()
        return block

    together(2, do, gpus=[1, 1])


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            call("all_reduce", *[TensorType(DType.INT16, (4,))] * 2, num_ranks=2, by="sum"),
            "of a type that NCCL does not reduce",
        ),
        (
            call(
                "all_gather", TensorType(DType.FLOAT32, (4, 2)), TensorType(DType.FLOAT32, (4, 4)),
                num_ranks=2, axis=1, rows=4,
            ),
            "of parts that do not lie in one piece, as NCCL's do",
        ),
    ],
)  # fmt: skip
def test_what_nccl_does_not_do_is_refused_with_the_line(together, asked, text):
    def do(rank):
        with pytest.raises(DeviceError, match=rf"model.py:1\) is {text}"):
            rank.communicator.bind(asked, (), ())

    together(2, do)


def test_an_abort_lets_a_stream_go_on_and_every_wait_says_why(together):
    """The other rank never comes: only the abort ends the wait."""
    has_begun = threading.Event()

    def do(rank):
        chain, view, block = reduction(rank)
        rank.communicator.ready()
        if rank.rank == 1:
            assert has_begun.wait(60)
            return
        chain()
        threading.Thread(target=rank.communicator.abort, args=("rank 1 was ended", 1)).start()
        with pytest.raises(DeviceFault, match="cuda:0 was given up: rank 1 was ended") as caught:
            rank.device.synchronize()
        has_begun.set()
        assert isinstance(caught.value.__cause__, PeerFailed)
        assert caught.value.__cause__.rank == 1
        # A graph may hold calls of a communicator that is gone.
        with pytest.raises(DeviceFault, match="rank 1 was ended"):
            chain()
        del view, block

    together(2, do)


def test_ranks_that_come_to_other_calls_are_told_of_an_error(together):
    """As the library tells of what failed on its own: a thread asks it, and ends then."""

    def do(rank):
        chains = [reduction(rank, order, 4 + order) for order in range(2)]
        rank.communicator.ready()
        for chain, *_ in chains if rank.rank else reversed(chains):
            chain()
        with suppress(DeviceFault):  # where the thread has asked by then
            rank.device.synchronize()
        name = f"nccl errors of rank {rank.rank}"
        for thread in [thread for thread in threading.enumerate() if thread.name == name]:
            thread.join(60)
        with pytest.raises(DeviceFault, match=r"came to another call|has aborted it"):
            rank.device.synchronize()

    together(2, do, look_s=0.01)


class Absent(CudaDevice):
    """A device that joins no communicator."""

    def join_communicator(self, *given):
        raise DeviceError("it is absent")


def test_a_rank_that_does_not_join_is_waited_for_until_the_deadline(together):
    def do(rank):
        _, _, block = reduction(rank)
        if rank.rank == 1:
            with pytest.raises(DeviceError, match="it is absent"):
                rank.communicator.ready()
            return block
        with pytest.raises(DeviceError, match=r"ncclCommInitRank gave .*rank 1 did not come in"):
            rank.communicator.ready()
        return block

    together(2, do, kinds=[CudaDevice, Absent], deadline_s=0.2)
