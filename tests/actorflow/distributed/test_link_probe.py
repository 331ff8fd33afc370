"""Links between hosts: who meets whom, what is measured, and who is not answered."""

import itertools
import socket
from contextlib import closing

import pytest

from actorflow.distributed.link_probe import (
    KeptLink,
    LinkFigures,
    LinkListener,
    address_toward,
    pairs_of_rounds,
    probe_link,
    stated_link,
)
from actorflow.environment.settings import Settings

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


def figures(mb_per_s, round_trip_us, problem=""):
    return LinkFigures(1, round_trip_us, mb_per_s, problem=problem)


def test_the_slowest_of_the_links_that_were_measured_is_stated():
    seen = [figures(1000, 64), figures(500, 32), figures(0, 0, problem="no answer")]
    assert stated_link(seen) == "0.5000:32.0"
    assert stated_link(seen[2:]) == ""


@pytest.mark.parametrize("factor", [0.86, 1.0, 1.16])
def test_what_differs_from_start_to_start_is_rounded_away(factor):
    assert stated_link([figures(1000 * factor, 64 / factor)]) == "1.0000:32.0"


@pytest.mark.parametrize(("rate", "round_trip"), [(0.0, 0.0), (1e-9, 1e9), (1e6, 1e-3)])
def test_any_figures_are_a_link_that_settings_take(rate, round_trip):
    link = stated_link([figures(rate, round_trip)])
    assert Settings.from_env({"ACTORFLOW_LINK": link}).link.is_possible


def test_a_link_is_kept_for_a_script_and_a_number_of_hosts(tmp_path):
    kept = KeptLink.of_job(tmp_path, "a.py", 2)
    assert kept.read() == ""
    kept.write("1.0000:32.0")
    assert KeptLink.of_job(tmp_path, "a.py", 2).read() == "1.0000:32.0"
    assert KeptLink.of_job(tmp_path, "a.py", 3).read() == ""
    assert KeptLink.of_job(tmp_path, "b.py", 2).read() == ""


@pytest.mark.parametrize("content", [b"", b"0:1", b"fast", b"\xff", b"1:1" * 100])
def test_a_file_that_holds_no_link_is_as_good_as_none(tmp_path, content):
    kept = KeptLink.of_job(tmp_path, "a.py", 2)
    kept.write("1.0000:32.0")
    kept.path.write_bytes(content)
    assert kept.read() == ""


def test_without_a_cache_nothing_is_kept():
    kept = KeptLink.of_job(None, "a.py", 2)
    kept.write("1.0000:32.0")
    assert kept.read() == ""
