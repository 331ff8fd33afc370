from dataclasses import replace
from itertools import pairwise

import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.errors import InternalError
from compiler.contract.placement import StreamRole
from compiler.lowering.chains import (
    COMPUTE,
    LaunchWork,
    StreamKey,
    form_chains,
)

COMM, H2D, D2H = [StreamKey(0, role) for role in (StreamRole.COMM, StreamRole.H2D, StreamRole.D2H)]

MESSAGE_NS = 20_000.0
DURATIONS = (0.0, 1.0, 500.0, MESSAGE_NS, 5 * MESSAGE_NS)


def message_ns(producer, consumer):
    """Return what a wait costs; the first device is the slowest."""
    return MESSAGE_NS / (1 + min(producer, consumer))


@st.composite
def works(draw, with_comm=True, num_devices=1):
    """A random DAG of up to 24 launches; each waits for some of the launches before it.

    Each belongs to a device. Some communicate and some copy. Collectives that do not wait for each
    other may share a bucket. So do copies that follow each other at once, but not where anything
    communicates: such buckets could wait for each other.
    """
    count = draw(st.integers(1, 24))
    durations = draw(st.lists(st.sampled_from(DURATIONS), min_size=count, max_size=count))
    before = [
        tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ()
        for i in range(count)
    ]
    kinds = st.sampled_from((False, False, False, True, True) if with_comm else (False,))
    comm = draw(st.lists(kinds, min_size=count, max_size=count))
    ways = st.sampled_from((COMPUTE, COMPUTE, COMPUTE, H2D, D2H) if with_comm else (COMPUTE,))
    streams, buckets, bucket, last = [], {}, 0, None
    for i in range(count):
        way = COMM if comm[i] else draw(ways)
        way = way._replace(device=draw(st.integers(0, num_devices - 1)))
        bucket += way != last or any(comm)
        last = way
        streams.append(way)
        if way.role in (H2D.role, D2H.role):
            buckets[i] = bucket
    turns, depths = {}, comm_depths(before, comm)
    for i in [i for i in range(count) if comm[i]]:
        last = max(turns, default=None)
        joins = last is not None and (depths[last], streams[last]) == (depths[i], streams[i])
        turns[i] = (turns[last][0] if joins and draw(st.booleans()) else len(turns), len(turns))
    return worked(durations, before, turns, buckets, streams)


def worked(durations, before, turns=(), buckets=(), streams=None):
    """Return work; `turns` has bucket and order of collectives. What has no stream computes."""
    turns = dict(turns)
    streams = streams or [COMM if i in turns else COMPUTE for i in range(len(durations))]
    buckets = {**dict(buckets), **{i: bucket for i, (bucket, _) in turns.items()}}
    orders = {i: order for i, (_, order) in turns.items()}
    return LaunchWork(tuple(durations), tuple(before), tuple(streams), buckets, orders)


def closure(count, pairs):
    """Return the set of (earlier, later) that the pairs imply, by Warshall's algorithm."""
    reach = [[False] * count for _ in range(count)]
    for a, b in pairs:
        reach[a][b] = True
    for k in range(count):
        for i in range(count):
            if reach[i][k]:
                reach[i] = [x or y for x, y in zip(reach[i], reach[k], strict=True)]
    return reach


def comm_depths(before, is_comm):
    """Return, per launch, the most collectives on any way that leads to it."""
    depths = []
    for row in before:
        depths.append(max([depths[p] + is_comm[p] for p in row], default=0))
    return depths


def chain_of(formed):
    return {i: c for c, chain in enumerate(formed.chains) for i in chain.launches}


def play(work, formed):
    """Run the chains, each stream one at a time in the order given; return all launches, in order.

    A chain begins when the chains before it in `order` are done; nothing else is waited for.
    """
    waiting = {stream: [] for stream in dict.fromkeys([c.stream for c in formed.chains])}
    for number, chain in enumerate(formed.chains):
        waiting[chain.stream].append(number)
    done, launches = set(), []
    while any(waiting.values()):
        ready = [
            queue
            for queue in waiting.values()
            if queue and all(a in done for a, b in formed.order if b == queue[0])
        ]
        assert ready, f"deadlock: {waiting}"
        number = ready[-1].pop(0)
        for i in formed.chains[number].launches:
            assert set(work.before[i]) <= set(launches), f"launch {i} began too early"
            launches.append(i)
        done.add(number)
    return launches


@given(works(num_devices=3), st.integers(1, 4))
@settings(max_examples=tiers.examples(120), deadline=None)
def test_every_launch_is_in_one_chain_on_a_stream_of_its_kind(work, streams):
    formed = form_chains(work, range(len(work.before)), streams, message_ns)
    launches = [i for chain in formed.chains for i in chain.launches]
    assert sorted(launches) == list(range(len(work.before)))
    for chain in formed.chains:
        assert chain.launches
        for i in chain.launches:
            assert chain.stream[:2] == work.stream[i][:2]
        assert chain.stream.nth < (streams if chain.stream.computes else 1)


@given(works(num_devices=3), st.integers(1, 4))
@settings(max_examples=tiers.examples(120), deadline=None)
def test_every_dependency_is_held_by_the_order_inside_or_between_chains(work, streams):
    formed = form_chains(work, range(len(work.before)), streams, message_ns)
    reach = closure(len(formed.chains), formed.order)
    chain = chain_of(formed)
    for later, row in enumerate(work.before):
        for earlier in row:
            a, b = chain[earlier], chain[later]
            if a == b:
                launches = formed.chains[a].launches
                assert launches.index(earlier) < launches.index(later)
            else:
                assert reach[a][b], (earlier, later, formed)


@given(works(num_devices=3), st.integers(1, 4))
@settings(max_examples=tiers.examples(120), deadline=None)
def test_the_order_leads_to_higher_numbers_and_holds_all_chains_of_a_stream(work, streams):
    formed = form_chains(work, range(len(work.before)), streams, message_ns)
    assert all(a < b for a, b in formed.order)
    reach = closure(len(formed.chains), formed.order)
    for stream in dict.fromkeys([chain.stream for chain in formed.chains]):
        own = [c for c, chain in enumerate(formed.chains) if chain.stream == stream]
        assert all(reach[a][b] for a, b in pairwise(own))


@given(works(num_devices=3), st.integers(1, 4))
@settings(max_examples=tiers.examples(120), deadline=None)
def test_chains_ordered_by_nothing_but_their_edges_never_deadlock_or_begin_too_early(work, streams):
    formed = form_chains(work, range(len(work.before)), streams, message_ns)
    assert len(play(work, formed)) == len(work.before)


@given(works(num_devices=3), st.integers(1, 4))
@settings(max_examples=tiers.examples(100), deadline=None)
def test_virtual_time_holds_the_durations_and_the_message_between_streams(work, streams):
    formed = form_chains(work, range(len(work.before)), streams, message_ns)
    for chain in formed.chains:
        needed = sum(work.duration_ns[i] for i in chain.launches)
        assert chain.end_ns - chain.start_ns >= needed * (1 - 1e-9)
    for a, b in formed.order:
        earlier, later = formed.chains[a], formed.chains[b]
        message = message_ns(earlier.stream.device, later.stream.device)
        message *= earlier.stream != later.stream
        assert later.start_ns >= (earlier.end_ns + message) * (1 - 1e-9)


@given(works(with_comm=False))
@settings(max_examples=tiers.examples(50), deadline=None)
def test_one_stream_without_communication_is_one_chain_in_the_order_given(work):
    formed = form_chains(work, range(len(work.before)), 1, message_ns)
    assert [chain.launches for chain in formed.chains] == [tuple(range(len(work.before)))]
    assert formed.order == ()


def meetings(work, streams):
    """Return the chains of collectives, with their numbers, in order; and all that was formed."""
    formed = form_chains(work, range(len(work.before)), streams, message_ns)
    chains = [(c, chain) for c, chain in enumerate(formed.chains) if chain.stream.role is COMM.role]
    return sorted(chains, key=lambda pair: work.turns[pair[1].launches[0]]), formed


@given(works(), st.integers(1, 3))
@settings(max_examples=tiers.examples(100), deadline=None)
def test_buckets_are_the_chains_of_their_stream_in_the_order_of_their_turns(work, streams):
    chains, formed = meetings(work, streams)
    buckets = {}
    for i in sorted(work.turns, key=work.turns.get):
        buckets.setdefault(work.buckets[i], []).append(i)
    assert [list(chain.launches) for _, chain in chains] == list(buckets.values())
    assert [c for c, _ in chains] == sorted([c for c, _ in chains])
    pairs = {(a, b) for (a, _), (b, _) in pairwise(chains)}
    assert pairs <= set(formed.order), "nothing holds the order"


@given(works(num_devices=2), st.integers(1, 3))
@settings(max_examples=tiers.examples(100), deadline=None)
def test_collectives_of_several_devices_wait_for_their_turns_too(work, streams):
    chains, formed = meetings(work, streams)
    reach = closure(len(formed.chains), formed.order)
    assert all(reach[a][b] for (a, _), (b, _) in pairwise(chains))


@given(works(), st.integers(1, 3), st.lists(st.sampled_from(DURATIONS), min_size=24, max_size=24))
@settings(max_examples=tiers.examples(100), deadline=None)
def test_no_pricing_of_kernels_changes_the_order_of_collectives(work, streams, durations):
    other = replace(work, duration_ns=tuple(durations[: len(work.before)]))
    one, two = [[chain.launches for _, chain in meetings(w, streams)[0]] for w in (work, other)]
    assert one == two


def test_buckets_begin_while_what_comes_after_their_last_gradient_is_computed():
    gradients = 64
    work = worked(
        (50_000.0,) * gradients + (10_000.0,) * gradients,
        tuple((i - 1,) if i else () for i in range(gradients)) + tuple((i,) for i in range(64)),
        {gradients + i: (i // 8, i) for i in range(gradients)},
    )
    chains, formed = meetings(work, 1)
    assert [len(chain.launches) for _, chain in chains] == [8] * 8
    compute = [chain for chain in formed.chains if chain.stream == COMPUTE]
    assert chains[0][1].start_ns < compute[-1].start_ns, "communication waits for all gradients"


def test_collectives_without_duration_keep_their_order_on_their_stream():
    # The bucket of 1 and 4 waits for launch 3; 2 waits for 1 alone, and for its turn.
    turns = {1: (0, 0), 4: (0, 1), 2: (1, 2)}
    work = worked((0.0,) * 5, ((), (0,), (1,), (), (3,)), turns)
    chains, formed = meetings(work, 1)
    assert [chain.launches for _, chain in chains] == [(1, 4), (2,)]
    assert len(play(work, formed)) == 5


def test_a_turn_against_what_a_collective_waits_for_is_a_bug():
    work = worked((1.0,) * 2, ((), (0,)), {0: (1, 1), 1: (0, 0)})
    with raises(InternalError):
        form_chains(work, range(2), 1, message_ns)


def test_two_long_branches_run_side_by_side_and_meet_once():
    long = 10 * MESSAGE_NS
    work = worked((long,) * 5, ((), (), (0,), (1,), (2, 3)))
    formed = form_chains(work, range(5), 2, message_ns)
    assert sorted(chain.launches for chain in formed.chains) == [(0, 2), (1, 3), (4,)]
    assert max(chain.end_ns for chain in formed.chains) < 5 * long


def test_two_devices_work_at_the_same_time_and_one_that_waits_takes_no_turn_of_the_other():
    long, other = 10 * MESSAGE_NS, StreamKey(1, StreamRole.COMPUTE)
    streams = [COMPUTE, COMPUTE, COMPUTE, other, other, other]
    before = ((), (), (), (0,), (), ())
    formed = form_chains(worked((long,) * 6, before, streams=streams), range(6), 1, message_ns)
    assert max(chain.end_ns for chain in formed.chains) == 3 * long
    (first, *_) = [chain for chain in formed.chains if chain.stream == other]
    assert first.launches == (4, 5)


def test_a_wait_across_devices_costs_what_the_slower_of_the_two_needs():
    long, other = 10 * MESSAGE_NS, StreamKey(2, StreamRole.COMPUTE)
    work = worked((long,) * 3, ((), (0,), (1,)), streams=[COMPUTE, other, COMPUTE])
    formed = form_chains(work, range(3), 1, message_ns)
    assert [chain.start_ns for chain in formed.chains] == [
        0,
        long + MESSAGE_NS,
        2 * (long + MESSAGE_NS),
    ]


def test_what_is_shorter_than_a_message_stays_on_one_stream():
    work = worked((100.0,) * 6, ((), (), (0,), (1,), (2, 3), ()))
    formed = form_chains(work, range(6), 4, message_ns)
    assert [chain.stream for chain in formed.chains] == [COMPUTE]


@given(works(), st.integers(1, 4))
@settings(max_examples=tiers.examples(40), deadline=None)
def test_the_same_work_gives_the_same_chains(work, streams):
    one, two = (form_chains(work, range(len(work.before)), streams, message_ns) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("streams", [1, 3])
def test_no_launches_are_no_chains(streams):
    formed = form_chains(worked((), ()), (), streams, message_ns)
    assert (formed.chains, formed.order) == ((), ())


def test_what_launches_outside_of_the_selection_do_is_not_waited_for():
    work = worked((1.0,) * 4, ((), (0,), (1,), (0, 2)))
    formed = form_chains(work, (2, 3), 2, message_ns)
    assert sorted(i for chain in formed.chains for i in chain.launches) == [2, 3]
    assert len(play(worked(work.duration_ns, ((), (), (), (2,))), formed)) == 2


@given(works(), st.integers(1, 3))
@settings(max_examples=tiers.examples(100), deadline=None)
def test_what_shares_a_bucket_of_a_stream_runs_in_one_chain(work, streams):
    chain = chain_of(form_chains(work, range(len(work.before)), streams, message_ns))
    of_bucket = {}
    for launch, bucket in work.buckets.items():
        of_bucket.setdefault((work.stream[launch], bucket), set()).add(chain[launch])
    assert all(len(found) == 1 for found in of_bucket.values())


def test_both_ways_of_the_link_and_compute_run_at_the_same_time():
    """Three rounds of copy in, compute, copy out: a pipeline of as many stages."""
    long = 50 * MESSAGE_NS
    before = [(), (0,), (1,), (), (3,), (4,), (), (6,), (7,)]
    work = worked(
        (long,) * 9,
        before,
        buckets={i: i for i in (0, 2, 3, 5, 6, 8)},
        streams=[H2D, COMPUTE, D2H] * 3,
    )
    formed = form_chains(work, range(9), 1, message_ns)
    assert [c.stream for c in formed.chains].count(COMPUTE) == 3
    end = max(chain.end_ns for chain in formed.chains)
    assert end == pytest.approx(5 * long, rel=0.1)


def test_buckets_that_wait_for_each_other_are_a_bug_that_is_named():
    buckets, streams = {0: 0, 1: 1, 2: 1, 3: 0}, [H2D, D2H, D2H, H2D]
    work = worked((1.0,) * 4, ((), (0,), (), (2,)), buckets=buckets, streams=streams)
    with raises(InternalError):
        form_chains(work, range(4), 1, message_ns)
