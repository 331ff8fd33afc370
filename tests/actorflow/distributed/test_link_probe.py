"""Links between hosts: who meets whom, what is measured, and who is not answered."""

import itertools
import socket
from contextlib import closing

import pytest

from actorflow.distributed.link_probe import (
    LinkListener,
    address_toward,
    pairs_of_rounds,
    probe_link,
)

NONCE = b"n" * 32


def stepping(step_s):
    """Return a counter that goes on by so much whenever it is read."""
    return map(step_s.__mul__, itertools.count()).__next__


@pytest.fixture
def listener():
    with closing(LinkListener("127.0.0.1", NONCE, clock=lambda: 1100.0)) as server:
        yield server


def probe(listener, nonce=NONCE, step_s=0.002):
    address = ("127.0.0.1", listener.port)
    return probe_link(7, address, nonce, clock=lambda: 1000.0, counter=stepping(step_s))


@pytest.mark.parametrize("num_hosts", range(1, 10))
def test_every_two_hosts_meet_once_and_nobody_is_in_two_pairs_of_a_round(num_hosts):
    rounds = pairs_of_rounds(num_hosts, 100)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(num_hosts), 2))
    for pairs in rounds:
        hosts = list(itertools.chain(*pairs))
        assert len(hosts) == len(set(hosts))


def test_fewer_rounds_are_the_first_of_all():
    assert pairs_of_rounds(30, 4) == pairs_of_rounds(30, 100)[:4]


def test_a_link_has_a_time_a_rate_and_the_offset_of_the_clocks(listener):
    figures = probe(listener)
    assert figures.problem == ""
    assert figures.peer == 7
    assert figures.round_trip_us == pytest.approx(2000)
    assert figures.mb_per_s == pytest.approx((4 << 20) / 0.002 / 1e6)
    assert figures.clock_ahead_s == pytest.approx(100 - 0.001)


def test_a_slow_link_is_not_asked_for_the_large_block(listener):
    assert probe(listener, step_s=0.1).mb_per_s == pytest.approx((256 << 10) / 0.1 / 1e6)


def test_nothing_is_answered_without_the_nonce_and_the_next_one_is(listener):
    assert probe(listener, nonce=b"x" * 32).problem
    assert not probe(listener).problem


def test_a_stranger_without_a_word_does_not_keep_a_host_from_its_link(listener):
    with socket.create_connection(("127.0.0.1", listener.port)):
        assert not probe(listener).problem


def test_a_host_that_nobody_listens_at_is_named_with_its_address(listener):
    port = listener.port
    listener.close()
    assert probe(listener).problem.startswith(f"127.0.0.1, port {port}: ")


def test_the_address_of_this_host_is_that_on_the_way_to_another():
    assert address_toward("127.0.0.1", 9) == "127.0.0.1"
