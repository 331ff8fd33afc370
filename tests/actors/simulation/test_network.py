"""What collectives take, against closed forms; and who gets how much of a shared link."""

from dataclasses import replace
from math import ceil, log2

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.simulation.costs import ALGORITHMS, Network, Wire, fair_rates, transfers
from compiler.contract.placement import Hosts, Mesh, MeshLink

FLAT = Network(Wire(2.0, 50.0))
HOSTS = Network(Wire(2.0, 500.0), per_host=4, inside=Wire(10.0, 10.0))


def transfer(network, op, num_ranks):
    return transfers(network, op, (tuple(range(num_ranks)),))[0]


def all_reduce_ns(network, num_ranks, size):
    return transfer(network, "all_reduce", num_ranks).duration_ns(size)


def sent_bytes(network, num_ranks, size):
    return transfer(network, "all_reduce", num_ranks).sent_bytes(size)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_ranks_over_one_link_send_each_other_half_twice(algorithm):
    network = replace(FLAT, algorithm=algorithm)
    assert all_reduce_ns(network, 2, 800) == 2 * (400 / 2.0 + 50.0)
    assert sent_bytes(network, 2, 800) == 800


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_sends_nothing(algorithm):
    network = replace(FLAT, algorithm=algorithm)
    assert (all_reduce_ns(network, 1, 800), sent_bytes(network, 1, 800)) == (0, 0)


@given(st.integers(2, 300), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(25), deadline=None)
def test_a_ring_of_like_ranks_is_patarasuks(num_ranks, size):
    took = 2 * (num_ranks - 1) * (size / num_ranks / 2.0 + 50.0)
    assert all_reduce_ns(FLAT, num_ranks, size) == pytest.approx(took)


@given(st.integers(2, 600), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(25), deadline=None)
def test_ring_and_halving_move_the_same_bytes_in_different_numbers_of_messages(num_ranks, size):
    for algorithm in ("ring", "halving"):
        moved = Network(Wire(2.0, 0.0), algorithm)
        assert all_reduce_ns(moved, num_ranks, size) == pytest.approx(size - size / num_ranks)
        assert sent_bytes(moved, num_ranks, size) == pytest.approx(2 * (size - size / num_ranks))
    no_bytes = Network(Wire(1e30, 1.0))
    assert all_reduce_ns(no_bytes, num_ranks, size) == pytest.approx(2 * (num_ranks - 1))
    halving = replace(no_bytes, algorithm="halving")
    assert all_reduce_ns(halving, num_ranks, size) == pytest.approx(2 * ceil(log2(num_ranks)))


@given(st.integers(2, 20), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(25), deadline=None)
def test_a_ring_host_by_host_goes_at_the_pace_of_its_slowest_hop(num_hosts, size):
    """One message at a time leaves each host, so nobody shares its link."""
    num_ranks = 4 * num_hosts
    chunk = size / num_ranks
    slowest = max(chunk / 10.0 + 10.0, chunk / 2.0 + 500.0)
    took = 2 * (num_ranks - 1) * slowest
    assert all_reduce_ns(HOSTS, num_ranks, size) == pytest.approx(took)


@given(st.integers(2, 20), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(25), deadline=None)
def test_the_rings_between_hosts_share_the_link_of_each_host(num_hosts, size):
    network, num_ranks = replace(HOSTS, algorithm="hierarchical"), 4 * num_hosts
    inside = 2 * 3 * (size / 4 / 10.0 + 10.0)
    between = 2 * (num_hosts - 1) * (size / num_ranks / (2.0 / 4) + 500.0)
    assert all_reduce_ns(network, num_ranks, size) == pytest.approx(inside + between)
    sent = 2 * 3 / 4 * size + 2 * (num_hosts - 1) / num_hosts * size / 4
    assert sent_bytes(network, num_ranks, size) == pytest.approx(sent)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_an_uplink_that_k_hosts_of_a_rack_send_over_gives_each_a_share(k):
    """Halving among 2 k hosts in two racks: in the last round all of them cross the uplinks."""
    network = Network(Wire(100.0, 10.0), "halving", per_rack=k, uplink=Wire(1.0, 1000.0))
    size, rounds = 1e6, int(log2(2 * k))
    within = sum([2 * (size / 2 ** (i + 1) / 100.0 + 10.0) for i in range(rounds - 1)])
    across = 2 * (size / 2**rounds / (1.0 / k) + 1010.0)
    assert all_reduce_ns(network, 2 * k, size) == pytest.approx(within + across)


def test_a_hierarchy_of_hosts_that_are_not_full_is_a_ring():
    hierarchy = replace(HOSTS, algorithm="hierarchical")
    assert all_reduce_ns(hierarchy, 10, 1.0) == all_reduce_ns(HOSTS, 10, 1.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(st.integers(1, 6), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(10), deadline=None)
def test_each_half_of_an_all_reduce_is_a_collective_of_its_own(algorithm, num_hosts, size):
    network, num_ranks = replace(HOSTS, algorithm=algorithm), 4 * num_hosts
    whole = transfer(network, "all_reduce", num_ranks)
    for op in ("reduce_scatter", "all_gather"):
        half = transfer(network, op, num_ranks)
        assert 2 * half.duration_ns(size) == pytest.approx(whole.duration_ns(size))
        assert 2 * half.sent_bytes(size) == pytest.approx(whole.sent_bytes(size))


@given(st.integers(2, 40), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(25), deadline=None)
def test_collectives_of_like_ranks_are_the_column_of_a_ring(num_ranks, size):
    """Bytes that each rank sends of the whole T: T (p-1)/p, and T (p-1)/p^2 of an all-to-all."""
    share = size * (num_ranks - 1) / num_ranks
    for op, sent in (
        ("all_reduce", 2 * share), ("reduce_scatter", share), ("all_gather", share),
        ("all_to_all", share / num_ranks),
    ):  # fmt: skip
        messages = (num_ranks - 1) * (2 if op == "all_reduce" else 1)
        found = transfer(FLAT, op, num_ranks)
        assert found.sent_bytes(size) == pytest.approx(sent)
        assert found.duration_ns(size) == pytest.approx(sent / 2.0 + messages * 50.0)


def test_a_message_takes_the_way_between_two_ranks():
    near, far = transfers(HOSTS, "send", ((1, 2), (3, 4)))
    assert near.duration_ns(100) == 100 / 10.0 + 10.0
    assert far.duration_ns(100) == 100 / 2.0 + 500.0
    assert transfer(HOSTS, "receive", 2).sent_bytes(100) == 100


def test_an_all_to_all_between_hosts_goes_at_the_pace_of_each_round():
    """Of two hosts of two: a neighbour, both across, or one across; two messages share a link."""
    network = replace(HOSTS, per_host=2)
    rounds = [250 / 2.0 + 500.0, 250 / (2.0 / 2) + 500.0, 250 / 2.0 + 500.0]
    assert transfer(network, "all_to_all", 4).duration_ns(4000) == pytest.approx(sum(rounds))


def test_groups_at_the_same_time_share_the_links_of_their_hosts():
    alone = transfers(HOSTS, "all_reduce", ((0, 4, 8),))[0]
    together = transfers(HOSTS, "all_reduce", tuple([(i, i + 4, i + 8) for i in range(4)]))
    assert len(set(together)) == 1
    assert alone.duration_ns(300) == pytest.approx(4 * (100 / 2.0 + 500.0))
    assert together[0].duration_ns(300) == pytest.approx(4 * (100 / (2.0 / 4) + 500.0))
    inside, across = transfers(HOSTS, "all_gather", ((0, 1, 2), (3, 4, 5)))
    assert inside.duration_ns(300) == pytest.approx(2 * (100 / 10.0 + 10.0))
    assert across.duration_ns(300) == pytest.approx(2 * (100 / 2.0 + 500.0))


def test_hierarchies_of_groups_take_what_each_host_has_of_them():
    network = replace(HOSTS, algorithm="hierarchical")
    found = transfers(network, "all_reduce", ((0, 1, 4, 5),))[0]
    inside, across = 2 * (50 / 10.0 + 10.0), 2 * (25 / (2.0 / 2) + 500.0)
    assert found.duration_ns(100) == pytest.approx(inside + across)


OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@st.composite
def placements(draw):
    """Return a mesh of two axes with hosts that its groups fill alike, and the ranks of a host."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)).filter(lambda s: s != (1, 1)))
    per_host = draw(st.sampled_from([
        *[n for n in range(1, shape[1] + 1) if shape[1] % n == 0],
        *[n * shape[1] for n in range(1, shape[0] + 1) if shape[0] % n == 0],
    ]))  # fmt: skip
    return Mesh(("data", "model"), shape), per_host


@given(placements(), st.sampled_from(OPS), st.floats(1, 1e9), st.sampled_from((0.0, 7.0, 900.0)))
@settings(max_examples=tiers.examples(40), deadline=None)
def test_what_the_compiler_prices_is_what_groups_take_that_meet_together(
    placement, op, size, latency_ns
):
    mesh, per_host = placement
    inside, between = Wire(10.0, latency_ns), Wire(2.0, 500.0)
    network = Network(between, "hierarchical", per_host, inside)
    links = [MeshLink(wire.gb_s, wire.latency_ns) for wire in (inside, between)]
    hosts = Hosts((per_host,), *links)
    for axis, extent in enumerate(mesh.shape):
        groups = tuple([group for along, group in mesh.groups() if along == axis])
        price = hosts.along(mesh, axis).time_ns(op, size, extent)
        times = [found.duration_ns(size) for found in transfers(network, op, groups)]
        assert times == pytest.approx([price] * len(groups))


@st.composite
def ways(draw):
    speeds = draw(st.lists(st.sampled_from((1.0, 3.0, 10.0, 0.7)), min_size=1, max_size=6))
    link = st.integers(0, len(speeds) - 1)
    messages = draw(st.lists(st.sets(link, min_size=1, max_size=4), min_size=1, max_size=12))
    return [[("link", i, speeds[i]) for i in sorted(own)] for own in messages]


@given(ways())
def test_a_message_is_held_up_by_a_full_link_where_nobody_is_faster(found):
    """The definition of max-min fair: Bertsekas & Gallager (1992), section 6.5.2."""
    rates = fair_rates(found)
    used, fastest, speed = {}, {}, {}
    for links, rate in zip(found, rates, strict=True):
        for _, number, capacity in links:
            used[number] = used.get(number, 0.0) + rate
            fastest[number] = max(fastest.get(number, 0.0), rate)
            speed[number] = capacity
    assert all(used[link] <= speed[link] * (1 + 1e-9) for link in used)
    for links, rate in zip(found, rates, strict=True):
        assert any(
            used[n] >= speed[n] * (1 - 1e-9) and rate >= fastest[n] * (1 - 1e-9)
            for _, n, _ in links
        )
