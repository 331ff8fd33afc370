"""What an all-reduce takes, against closed forms; and who gets how much of a shared link."""

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.network import ALGORITHMS, Network, Wire, fair_rates

FLAT = Network(Wire(2.0, 50.0))
HOSTS = Network(Wire(2.0, 500.0), per_host=4, inside=Wire(10.0, 10.0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_ranks_over_one_link_send_each_other_half_twice(algorithm):
    network = replace(FLAT, algorithm=algorithm)
    assert network.all_reduce_ns(2, 800) == 2 * (400 / 2.0 + 50.0)
    assert network.sent_bytes(2, 800) == 800


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_sends_nothing(algorithm):
    network = replace(FLAT, algorithm=algorithm)
    assert (network.all_reduce_ns(1, 800), network.sent_bytes(1, 800)) == (0, 0)


@given(st.integers(2, 300), st.floats(1, 1e9))
@settings(max_examples=25, deadline=None)
def test_a_ring_of_like_ranks_is_patarasuks(num_ranks, size):
    took = 2 * (num_ranks - 1) * (size / num_ranks / 2.0 + 50.0)
    assert FLAT.all_reduce_ns(num_ranks, size) == pytest.approx(took)


@given(st.integers(2, 600), st.floats(1, 1e9))
@settings(max_examples=25, deadline=None)
def test_ring_and_halving_move_the_same_bytes_in_different_numbers_of_messages(num_ranks, size):
    for algorithm in ("ring", "halving"):
        moved = Network(Wire(2.0, 0.0), algorithm)
        assert moved.all_reduce_ns(num_ranks, size) == pytest.approx(size - size / num_ranks)
        assert moved.sent_bytes(num_ranks, size) == pytest.approx(2 * (size - size / num_ranks))
    no_bytes = Network(Wire(1e30, 1.0))
    assert no_bytes.all_reduce_ns(num_ranks, size) == pytest.approx(2 * (num_ranks - 1))
    halving = replace(no_bytes, algorithm="halving")
    assert halving.all_reduce_ns(num_ranks, size) == pytest.approx(2 * ceil(log2(num_ranks)))


@given(st.integers(2, 20), st.floats(1, 1e9))
@settings(max_examples=25, deadline=None)
def test_a_ring_host_by_host_goes_at_the_pace_of_its_slowest_hop(num_hosts, size):
    """One message at a time leaves each host, so nobody shares its link."""
    num_ranks = 4 * num_hosts
    chunk = size / num_ranks
    slowest = max(chunk / 10.0 + 10.0, chunk / 2.0 + 500.0)
    took = 2 * (num_ranks - 1) * slowest
    assert HOSTS.all_reduce_ns(num_ranks, size) == pytest.approx(took)


@given(st.integers(2, 20), st.floats(1, 1e9))
@settings(max_examples=25, deadline=None)
def test_the_rings_between_hosts_share_the_link_of_each_host(num_hosts, size):
    network, num_ranks = replace(HOSTS, algorithm="hierarchical"), 4 * num_hosts
    inside = 2 * 3 * (size / 4 / 10.0 + 10.0)
    between = 2 * (num_hosts - 1) * (size / num_ranks / (2.0 / 4) + 500.0)
    assert network.all_reduce_ns(num_ranks, size) == pytest.approx(inside + between)
    sent = 2 * 3 / 4 * size + 2 * (num_hosts - 1) / num_hosts * size / 4
    assert network.sent_bytes(num_ranks, size) == pytest.approx(sent)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_an_uplink_that_k_hosts_of_a_rack_send_over_gives_each_a_share(k):
    """Halving among 2 k hosts in two racks: in the last round all of them cross the uplinks."""
    network = Network(Wire(100.0, 10.0), "halving", per_rack=k, uplink=Wire(1.0, 1000.0))
    size, rounds = 1e6, int(log2(2 * k))
    within = sum([2 * (size / 2 ** (i + 1) / 100.0 + 10.0) for i in range(rounds - 1)])
    across = 2 * (size / 2**rounds / (1.0 / k) + 1010.0)
    assert network.all_reduce_ns(2 * k, size) == pytest.approx(within + across)


def test_full_hosts_are_what_a_hierarchy_needs():
    with pytest.raises(ValueError, match="needs full hosts: 10 ranks, 4 to a host"):
        replace(HOSTS, algorithm="hierarchical").all_reduce_ns(10, 1.0)


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
