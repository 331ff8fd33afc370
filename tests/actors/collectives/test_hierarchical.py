"""Ranks on several hosts, which are names here: threads with messages through boxes."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mailboxes import Mailboxes
from meetings import call, cut, placed, reduced, same_bits, type_of, values
from rank_threads import RankThreads

from actors.collectives import crossing, pieces
from actors.collectives.hierarchical import HierarchicalCommunicator
from actors.collectives.segments import DTYPES
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.placement import Mesh
from compiler.contract.types import DType, TensorType

PLACEMENTS = ("ab", "aaa", "aab", "aba", "aabb", "abab", "abcd", "aaab", "abbc", "abbba")


@pytest.fixture
def across(native_toolchain, monkeypatch):
    """Return what runs `do(communicator)` on ranks of hosts, named by a letter each.

    Pieces are short, so that an operand has several.
    """
    monkeypatch.setattr(crossing, "PIECE_BYTES", 4096)

    def run(hosts, do, shape=None, seed=0, mail=None, **options):
        shape = shape or (len(hosts),)
        mesh = Mesh(("data", "model")[: len(shape)], shape)
        run.threads, run.mail = RankThreads(len(hosts)), mail or Mailboxes(seed)
        run.all = {}

        def one(rank):
            own = run.all[rank] = HierarchicalCommunicator(
                rank, mesh, run.threads.gather(rank), native_toolchain, host=hosts[rank],
                connect=run.mail.connect, **options,
            )  # fmt: skip
            try:
                return do(own)
            except PeerFailed as error:
                # As the coordinator does for ranks of other hosts.
                for other in run.all.values():
                    other.abort(str(error), error.rank)
                raise
            finally:
                own.close()

        return run.threads.run(one)

    return run


def test_ends_beside_one_meet_over_hosts_when_it_is_closed_as_well(across):
    type_ = TensorType(DType.FLOAT32, (17_001,))

    def do(communicator):
        array = communicator.allocate(type_.size_bytes, 64).view(np.float32)
        asked = call("all_reduce", type_, type_, 0, num_ranks=3, by="sum")
        communicator.bind(asked, (array,), (array,))
        communicator.ready()
        make, found = communicator.beside(), []
        for number in range(2):
            end = make()
            launch = end.bind(asked, (array,), (array,))
            end.ready()
            communicator.close()
            array[...] = number + communicator.rank
            launch()
            found.append({*array.tolist()})
            end.close()
        return found

    assert across("aab", do) == [[{3.0}, {6.0}]] * 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_an_all_reduce_has_the_bits_of_one_host(across, hosts):
    cases = [(dtype, by, n) for dtype in DTYPES for by in ("sum", "max") for n in (0, 3, 17_001)]

    def do(communicator):
        bound = []
        for order, (dtype, by, size) in enumerate(cases):
            array = placed(communicator, values(dtype, (size,), (order, communicator.rank)))
            type_ = type_of(dtype, array)
            asked = call("all_reduce", type_, type_, order, num_ranks=len(hosts), by=by)
            bound.append((array, communicator.bind(asked, (array,), (array,))))
        communicator.ready()
        for _, meet in bound:
            meet()
        return [array for array, _ in bound]

    found = across(hosts, do)
    for order, (dtype, by, size) in enumerate(cases):
        given_ = [values(dtype, (size,), (order, rank)) for rank in range(len(hosts))]
        wanted = reduced(dtype, given_, by)
        for rank in range(len(hosts)):
            assert same_bits(dtype, found[rank][order], wanted), (dtype, by, size, rank)


def exchange(across, hosts, op, dtype, shape, axes, seed=0, is_private=False):
    """Run one collective over a random whole, three times, and compare what every rank has."""
    ranks, (axis, to_axis) = len(hosts), axes
    arrays = np.stack([values(dtype, shape, (5, rank)) for rank in range(ranks)])

    def do(communicator):
        rank = communicator.rank
        if op == "reduce_scatter":
            start, wanted = (
                arrays[rank],
                cut(reduced(dtype, list(arrays), "sum"), axis, ranks, rank),
            )
            attrs = {"axis": axis, "rows": wanted.shape[axis], "by": "sum"}
        else:
            start, attrs = cut(arrays[0], axis, ranks, rank), {"axis": axis, "rows": shape[axis]}
            wanted = arrays[0]
            if op == "all_to_all":
                wanted = cut(wanted, to_axis, ranks, rank)
                attrs |= {"to_axis": to_axis, "to_rows": wanted.shape[to_axis]}
        start, left = np.ascontiguousarray(start), np.zeros_like(wanted)
        # Others read what is summed, and write what is moved.
        if op == "reduce_scatter" or not is_private:
            start = placed(communicator, start)
        if op != "reduce_scatter" or not is_private:
            left = placed(communicator, left)
        asked = call(op, type_of(dtype, start), type_of(dtype, left), num_ranks=ranks, **attrs)
        meet = communicator.bind(asked, (start,), (left,))
        communicator.ready()
        for _ in range(3):
            left[...] = 0
            meet()
            assert same_bits(dtype, left, wanted), (hosts, op, dtype, shape, axes, rank)

    across(hosts, do, seed=seed)


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("hosts", ["ab", "aabb", "abbc"])
def test_parts_cross_aside_and_in_place(across, hosts, op):
    for shape in ((5, 7, 3), (50, 9, 31)):
        for axes in ((0, 1), (1, 2), (2, 0)):
            exchange(across, hosts, op, DType.FLOAT32, shape, axes)


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_what_others_do_not_work_on_may_lie_in_private_memory(across, hosts, op):
    for shape in ((5, 7, 3), (50, 9, 31)):
        exchange(across, hosts, op, DType.FLOAT32, shape, (0, 1), is_private=True)


@given(
    hosts=st.text("abc", min_size=2, max_size=5),
    op=st.sampled_from(["reduce_scatter", "all_gather", "all_to_all"]),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), min_size=2, max_size=3),
    data=st.data(),
)
@settings(
    max_examples=tiers.examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_shape_crosses_by_any_placement(across, hosts, op, dtype, shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    others = [b for b in range(len(shape)) if b != axis]
    axes = axis, data.draw(st.sampled_from(others))
    exchange(across, hosts, op, dtype, tuple(shape), axes, data.draw(st.integers(0, 9)))


def test_groups_inside_a_host_and_across_meet_apart(across):
    def do(communicator):
        found = []
        for order, (name, size) in enumerate([("data", 3), ("model", 9000), ("data", 9000)]):
            array = placed(communicator, np.full(size, 10.0**communicator.rank, np.float32))
            type_ = type_of(DType.FLOAT32, array)
            asked = call("all_reduce", type_, type_, order, group=name, num_ranks=2, by="sum")
            found.append((array, communicator.bind(asked, (array,), (array,))))
        communicator.ready()
        for _, meet in found:
            meet()
        return [{*array.tolist()} for array, _ in found]

    rows = across("aabb", do, shape=(2, 2))
    assert rows[0] == [{101.0}, {11.0}, {101.0}]
    assert rows[3] == [{1010.0}, {1100.0}, {1010.0}]


def test_what_one_rank_sends_another_receives_on_the_next_host(across):
    def do(communicator):
        for order, size in enumerate((7, 9000)):
            whole = np.arange(size, dtype=np.float32)
            array = placed(communicator, whole * (communicator.rank == 0))
            type_ = type_of(DType.FLOAT32, array)
            none = type_of(DType.UINT8, np.zeros(0, np.uint8))
            op = ("send", "receive")[communicator.rank]
            reads, makes = (type_, none) if op == "send" else (none, type_)
            asked = call(op, reads, makes, order, num_ranks=2, peer=1 - communicator.rank)
            ends = ((array,), ()) if op == "send" else ((), (array,))
            yield array, whole, communicator.bind(asked, *ends)

    def both(communicator):
        bound = [*do(communicator)]
        communicator.ready()
        for array, whole, meet in bound:
            meet()
            assert (array == whole).all()

    across("ab", both)


def test_a_host_sends_no_more_than_its_share_twice(across):
    """An all-reduce of n bytes over H hosts: each sends 2 (H - 1) / H of n, whatever its ranks."""
    size = 1 << 18

    def do(communicator):
        array = placed(communicator, np.ones(size // 4, np.float32))
        type_ = type_of(DType.FLOAT32, array)
        asked = call("all_reduce", type_, type_, num_ranks=len(hosts), by="sum")
        meet = communicator.bind(asked, (array,), (array,))
        communicator.ready()
        meet()
        return communicator.bytes_sent

    for hosts, wanted in (("ab", 2), ("aabb", 2), ("abcd", 6)):
        assert sum(across(hosts, do)) == pytest.approx(wanted * size, rel=0.03)


def bind(communicator, order=0, size=9000):
    array = placed(communicator, np.zeros(size, np.float32))
    type_ = type_of(DType.FLOAT32, array)
    num_ranks = communicator.mesh.num_ranks
    asked = call("all_reduce", type_, type_, order, num_ranks=num_ranks, by="sum")
    return communicator.bind(asked, (array,), (array,))


def failures(across, hosts, do, **options):
    """Return what each rank raised."""
    with pytest.raises(PeerFailed):
        across(hosts, do, **options)
    return {rank: str(error) for rank, error in across.threads.errors.items()}


@pytest.mark.parametrize("size", [9, 9000], ids=["aside", "in place"])
@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_who_comes_for_another_collective_is_named(across, hosts, size):
    def do(communicator):
        meets = [bind(communicator, order, size) for order in range(2)]
        communicator.ready()
        meets[communicator.rank * 2 // len(hosts)]()

    said = failures(across, hosts, do)
    assert len(said) == len(hosts)
    assert any(
        [" runs all_reduce " in text and "firing 0, where rank" in text for text in said.values()]
    )


def test_who_comes_with_a_longer_message_is_named(across):
    def do(communicator):
        meets = [bind(communicator, 0, 9)]
        start = placed(communicator, np.zeros((2, 9000), np.float32))
        types = type_of(DType.FLOAT32, start), type_of(DType.FLOAT32, start[:1])
        attrs = {"num_ranks": 2, "axis": 0, "rows": 1, "by": "sum"}
        left = placed(communicator, np.zeros((1, 9000), np.float32))
        asked = call("reduce_scatter", *types, 1, "scatter", **attrs)
        meets.append(communicator.bind(asked, (start,), (left,)))
        communicator.ready()
        meets[communicator.rank]()

    said = failures(across, "ab", do)
    assert any([" runs " in text for text in said.values()])


def test_who_skips_a_firing_is_named(across):
    def do(communicator):
        meet = bind(communicator)
        communicator.ready()
        meet.count.value = communicator.rank  # as if rank 1 had met for it before
        meet()

    said = failures(across, "ab", do)
    assert any(["runs firing" in text for text in said.values()])


@pytest.mark.parametrize("size", [9, 9000], ids=["aside", "in place"])
def test_who_is_late_on_another_host_is_named_by_all(across, size):
    def do(communicator):
        meet = bind(communicator, size=size)
        communicator.ready()
        if communicator.rank < 2:
            meet()

    said = failures(across, "aab", do, deadline_s=1)
    errors = across.threads.errors
    assert {rank: errors[rank].rank for rank in (0, 1)} == {0: 2, 1: 2}
    assert any(["rank 2 did not arrive within 1 s where rank" in text for text in said.values()])


def test_a_rank_counts_how_long_it_waits_for_messages_of_another_host(across):
    def do(communicator):
        meet = bind(communicator)
        communicator.ready()
        # The other rank comes when the first one has looked for its messages in vain for long.
        while communicator.rank and across.mail.ends[0].num_looks < 50:
            pass
        meet()
        return communicator.waited_ns

    assert across("ab", do)[0] > 0


def test_an_abort_ends_who_waits_for_another_host(across):
    def do(communicator):
        meet = bind(communicator)
        communicator.ready()
        if communicator.rank == 0:
            meet()
        while not across.mail.ends[0].num_received:
            pass  # The first rank waits for messages of this one, which never sends any.
        across.all[0].abort("the loss is not finite", 1)

    said = failures(across, "ab", do, deadline_s=3600)
    assert said == {0: "rank 0 aborted the run: the loss is not finite"}
    assert len(across.mail.ends[0].abandoned) > 0


def test_a_damaged_header_is_another_collective(across):
    def changed(sender, receiver, data):
        data[0] ^= 1
        return data

    def do(communicator):
        meet = bind(communicator)
        communicator.ready()
        meet()

    said = failures(across, "ab", do, mail=Mailboxes(changed=changed))
    assert any(["something unknown" in text for text in said.values()])


def test_a_job_whose_groups_stay_inside_hosts_connects_none(across):
    def do(communicator):
        array = placed(communicator, np.ones(3, np.float32))
        type_ = type_of(DType.FLOAT32, array)
        asked = call("all_reduce", type_, type_, group="model", num_ranks=2, by="sum")
        meet = communicator.bind(asked, (array,), (array,))
        communicator.ready()
        meet()
        return array.tolist(), communicator.bytes_sent

    assert across("aabb", do, shape=(2, 2)) == [([2.0] * 3, 0)] * 4
    assert across.mail.ends == {}


def test_a_host_without_a_name_is_refused(native_toolchain):
    with raises(DeviceError):
        HierarchicalCommunicator(
            0, Mesh(("data",), (2,)), None, native_toolchain, host="", connect=None
        )


@pytest.mark.parametrize(("hosts", "is_sent"), [("aa", False), ("ab", True)])
def test_names_of_hosts_alone_say_how_tensors_get_to_another_rank(across, hosts, is_sent):
    """Both ranks are threads of one process, so that memory would do in either case."""

    def do(communicator):
        meet = bind(communicator)
        communicator.ready()
        meet()
        return communicator.bytes_sent > 0

    assert across(hosts, do) == [is_sent] * 2
    assert bool(across.mail.ends) == is_sent


class FailingTransport:
    """Begins as many messages as it is told, and then fails."""

    def __init__(self, count):
        self.count = count

    def isend(self, data, peer, tag):
        if not self.count:
            raise PeerFailed(f"no message to {peer}", rank=peer)
        self.count -= 1
        return peer

    irecv = isend


@pytest.mark.parametrize("kind", ["out", "in"])
def test_messages_that_were_begun_before_one_fails_are_still_known(kind):
    peers, buffers = (1, 2, 3), pieces.MessageBuffers(3)
    buffers.allocate(pieces.HEADER.size + 16)
    flow = (
        pieces.Outgoing(peers, 0, [(0, 4)], 4, buffers, lambda *_: None)
        if kind == "out"
        else pieces.Incoming(peers, 0, [(0, 4)], (4, 4, 4), buffers, lambda *_: None)
    )
    flow.start()
    at = SimpleNamespace(digest=1, firing=1, transport=FailingTransport(2))
    with pytest.raises(PeerFailed):
        flow.step(at)
    assert flow.requests() == [1, 2]


def test_pieces_cover_what_they_are_of():
    assert crossing.pieces_of(3, 10, 4) == [(3, 7), (7, 10)]
    assert crossing.pieces_of(3, 3, 4) == []
    assert pieces.WINDOW > 1
