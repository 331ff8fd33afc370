"""Joined launches: order, failure, and what stays launch by launch."""

import numpy as np
import pytest
from error_texts import raises

from actors.kernels.common.host_memory import address
from actors.kernels.library.launch import (
    NativeChain,
    NativeError,
    merge_native_launches,
    native_launch,
)
from actors.kernels.library.runtime import CFunction, unique_name
from actors.loop.worker import launch_number

APPEND = """
AF_EXPORT int32_t NAME(void *arguments) {
    af_word *a = arguments;
    int64_t *log = a[0].p;
    log[++log[0]] = a[1].i;
    return a[2].i;
}
"""


@pytest.fixture
def log():
    return np.zeros(100, np.int64)


@pytest.fixture
def make(native, log):
    """Return a function that makes a launch which appends a number, and returns a status."""
    name = unique_name("test", APPEND)
    where = native.address_of(CFunction(name, APPEND.replace("NAME", name)))

    def launch(number, status=0):
        words = [address(log), number, status]
        return native_launch(where, words, (log,), lambda s: f"launch {number} says {s}")

    return launch


def logged(log):
    return log[1 : 1 + log[0]].tolist()


def test_native_neighbours_become_one_item_and_keep_their_order(make, log):
    (item,) = merge_native_launches(tuple(make(n) for n in range(10)))
    assert isinstance(item, NativeChain)
    assert item.num_launches == 10
    item()
    item()
    assert logged(log) == [*range(10), *range(10)]


def test_python_launches_stay_between(make, log):
    seen = []
    chain = merge_native_launches(
        (make(1), make(2), lambda: seen.append(logged(log)), make(3), make(4), make(5))
    )
    assert [getattr(item, "num_launches", 1) for item in chain] == [2, 1, 3]
    for item in chain:
        item()
    assert seen == [[1, 2]]
    assert logged(log) == [1, 2, 3, 4, 5]


def test_a_lone_launch_is_left_as_it_is(make):
    launch = make(1)
    assert merge_native_launches((launch,)) == (launch,)
    assert merge_native_launches(()) == ()


def test_the_first_failure_ends_the_item_and_is_known_by_its_number(make, log):
    chain = merge_native_launches((make(1), lambda: None, make(2), make(3, status=9), make(4)))
    chain[0](), chain[1]()
    with raises(NativeError):
        chain[2]()
    assert logged(log) == [1, 2, 3]
    assert launch_number(chain, 2, 5) == 3


def test_an_item_that_succeeds_after_a_failure_starts_at_its_first_launch(make, log):
    failing = make(2, status=1)
    (item,) = merge_native_launches((make(1), failing))
    with pytest.raises(NativeError):
        item()
    assert item.running == 1
    failing.keep[0][2] = 0  # its status from now on
    item()
    assert logged(log) == [1, 2, 1, 2]


def test_every_launch_of_an_item_can_be_timed(make, log):
    (item,) = merge_native_launches((make(1), make(2), make(3)))
    times = item.timed()
    assert len(times) == 3
    assert min(times) >= 0
    assert logged(log) == [1, 2, 3]
    item()
    assert logged(log) == [1, 2, 3, 1, 2, 3]


def test_the_number_of_a_plain_item_counts_what_was_joined_before(make):
    chain = merge_native_launches((make(1), make(2), lambda: None))
    assert [launch_number(chain, item, 3) for item in range(3)] == [0, 2, None]
