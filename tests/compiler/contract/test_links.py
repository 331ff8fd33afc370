"""What joins ranks of several hosts, and what collectives take there, against what must cross."""

import itertools
import math

import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.errors import InternalError
from compiler.contract.placement import (
    AxisLinks,
    Hosts,
    Mesh,
    MeshLink,
    hosts_of,
    joined,
    on_hosts,
)

NEAR, FAR = MeshLink(10.0, 1_000.0), MeshLink(1.0, 30_000.0)
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")
MESH = Mesh(("data", "model"), (2, 2))


@pytest.mark.parametrize(
    ("mesh", "sizes", "per_host"),
    [
        (MESH, (2,), (1, 2)),
        (MESH, (4,), (2, 2)),
        (MESH, (1,), (1, 1)),
        (MESH, (3, 1), (1, 1)),
        (Mesh(("data",), (4,)), (2,), (2,)),
        (Mesh(("data",), (4,)), (3, 1), (1,)),
        (Mesh(("data", "model"), (4, 2)), (4,), (2, 2)),
        (Mesh(("data", "stage", "model"), (2, 2, 2)), (4,), (1, 2, 2)),
        (Mesh(("data", "model"), (3, 2)), (3,), (1, 1)),
    ],
    ids=str,
)
def test_an_axis_has_its_ranks_of_each_host(mesh, sizes, per_host):
    hosts = Hosts(sizes, NEAR, FAR)
    links = [hosts.along(mesh, axis) for axis in range(len(mesh.names))]
    assert tuple([link.per_host for link in links]) == per_host
    # All ranks of the largest host share its link.
    assert {link.between.bytes_per_ns for link in links} == {1.0 / min(sizes[0], mesh.num_ranks)}


def test_hosts_after_the_last_one_that_is_listed_are_as_large_as_that():
    assert Hosts((3, 2), NEAR, FAR).of_ranks(8) == (0, 0, 0, 1, 1, 2, 2, 3)
    assert Hosts((3, 1, 9), NEAR, FAR).of_ranks(5) == (0, 0, 0, 1, 2)


def test_ranks_of_one_host_are_joined_as_they_are_without_hosts():
    one_host = on_hosts(MESH, Hosts((4,), NEAR, FAR), 3)
    assert one_host.hosts is None
    for link, alone in zip(one_host.links, joined(MESH, NEAR, 3).links, strict=True):
        for op in OPS:
            assert link.time_ns(op, 1e6, 2) == alone.time_ns(op, 1e6, 2)


def test_an_axis_of_one_rank_is_none():
    context = on_hosts(Mesh(("data", "one", "model"), (2, 1, 2)), Hosts((2,), NEAR, FAR), 1)
    assert context.mesh == MESH
    assert [link.per_host for link in context.links] == [1, 2]
    assert context.without("data").link("model").per_host == 2


@given(st.integers(2, 300), st.integers(0, 2**34), st.floats(0.1, 400), st.floats(0, 1e5))
@settings(max_examples=tiers.examples(50), deadline=None)
def test_on_one_host_a_collective_takes_to_the_bit_what_a_ring_does(count, size, rate, latency_ns):
    """Durations are part of a plan: those of one host are what they were before there were more."""
    link, size = MeshLink(rate, latency_ns), float(size)
    share, around = size * (count - 1) / count, count - 1
    ring = {
        "all_reduce": (2 * share, 2 * around), "reduce_scatter": (share, around),
        "all_gather": (share, around), "all_to_all": (share / count, around), "send": (size, 1),
    }  # fmt: skip
    for op, sent in ring.items():
        assert AxisLinks.alike(link).time_ns(op, size, count) == link.time_ns(*sent)
    assert AxisLinks.alike(link).least_bytes(count) == count * latency_ns * rate


@st.composite
def axes(draw):
    """Return how many ranks of an axis each host has, and how many hosts there are."""
    return draw(st.integers(1, 8)), draw(st.integers(2, 12))


@given(axes(), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(50), deadline=None)
def test_hosts_whose_link_is_as_fast_as_the_inside_take_no_longer_than_a_ring(axis, size):
    per_host, num_hosts = axis
    count = per_host * num_hosts
    free, like = MeshLink(2.0, 0.0), MeshLink(2.0, 50.0)
    for op in OPS:
        flat = AxisLinks.alike(free).time_ns(op, size, count)
        assert AxisLinks(free, free, per_host).time_ns(op, size, count) == pytest.approx(flat)
        flat = AxisLinks.alike(like).time_ns(op, size, count)
        assert AxisLinks(like, like, per_host).time_ns(op, size, count) <= flat * (1 + 1e-9)
        assert AxisLinks(like, like, 1).time_ns(op, size, count) == flat


def crossing_bytes(op, size, num_hosts):
    """Return the least that leaves a host in a collective, whatever the algorithm."""
    share = 1 / num_hosts
    return size * {
        # A host sends its part of the sum, or gets what others have of the whole, once at least.
        "all_reduce": 2 * (1 - share), "reduce_scatter": 1 - share, "all_gather": 1 - share,
        "all_to_all": share * (1 - share), "send": 1.0,
    }[op]  # fmt: skip


@given(axes(), st.floats(1, 1e9))
@settings(max_examples=tiers.examples(50), deadline=None)
def test_no_collective_is_faster_than_the_bytes_that_must_cross(axis, size):
    per_host, num_hosts = axis
    mesh = Mesh(("data",), (per_host * num_hosts,))
    links = Hosts((per_host,), MeshLink(1e12, 0.0), MeshLink(1.0, 0.0)).along(mesh, 0)
    for op in OPS:
        least = crossing_bytes(op, size, num_hosts)
        assert links.time_ns(op, size, mesh.num_ranks) >= least * (1 - 1e-9)


@given(axes(), st.floats(1, 1e9), st.integers(0, 3), st.floats(1, 10))
@settings(max_examples=tiers.examples(50), deadline=None)
def test_what_joins_ranks_better_never_takes_longer(axis, size, which, factor):
    per_host, num_hosts = axis
    numbers = [10.0, 1_000.0, 1.0, 30_000.0]
    better = [*numbers]
    better[which] *= 1 / factor if which % 2 else factor
    links, faster = [
        AxisLinks(MeshLink(a, b), MeshLink(c, d), per_host) for a, b, c, d in (numbers, better)
    ]
    for op in OPS:
        times = [one.time_ns(op, size, per_host * num_hosts) for one in (faster, links)]
        assert times[0] <= times[1]


@given(axes())
@settings(max_examples=tiers.examples(30), deadline=None)
def test_a_bucket_moves_its_bytes_in_the_time_of_its_messages(axis):
    per_host, num_hosts = axis
    count, links = per_host * num_hosts, AxisLinks(NEAR, FAR, per_host)
    size = links.least_bytes(count)
    messages = links.time_ns("all_reduce", 0.0, count)
    assert links.time_ns("all_reduce", size, count) == pytest.approx(2 * messages)
    assert links.with_messages(0.5).time_ns("all_reduce", 0.0, count) == pytest.approx(messages / 2)
    assert links.least_bytes(1) == 0.0


def test_no_rank_has_anything_to_send_to_itself():
    links = AxisLinks(NEAR, FAR, 1)
    assert [links.time_ns(op, 1e6, 1) for op in OPS] == [0.0] * len(OPS)


def test_hosts_are_read_back_from_what_a_plan_records_of_them():
    hosts = Hosts((2, 1), NEAR, FAR)
    assert hosts_of(hosts.record) == hosts
    assert hosts_of(()) is None


_LINK = (1.0, 2.0)


@pytest.mark.parametrize(
    "record",
    [
        3, "2", (2,), ((2,), _LINK), ((), _LINK, _LINK), ((0,), _LINK, _LINK),
        ((2, -1), _LINK, _LINK), (("2",), _LINK, _LINK), ((2,), (0.0, 2.0), _LINK),
        ((2,), _LINK, (1.0, -2.0)), ((2,), _LINK, (math.nan, 2.0)), ((2,), (math.inf, 2.0), _LINK),
        ((2,), _LINK, (1.0,)), ((2,), _LINK, _LINK, _LINK),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_record_of_hosts_is_refused(record):
    with raises(InternalError):
        hosts_of(record)


def test_an_axis_that_crosses_is_dearer_than_one_that_does_not():
    links = [Hosts((2,), NEAR, FAR).along(MESH, axis) for axis in range(2)]
    for op, size in itertools.product(OPS, (0.0, 1e3, 1e8)):
        across, inside = [link.time_ns(op, size, 2) for link in links]
        assert across > inside
