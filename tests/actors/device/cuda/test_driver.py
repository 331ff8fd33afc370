"""The roles of a driver: each is small, and what stands for a GPU has all of them."""

import inspect
from itertools import combinations

import pytest

from actors.device.cuda.cupy_driver import CupyDriver
from actors.device.cuda.driver import (
    CudaDriver,
    DriverCollectives,
    DriverGraphs,
    DriverKernels,
    DriverLibraries,
    DriverMemory,
    DriverStreams,
)
from actors.testing.emulated.driver import EmulatedDriver

ROLES = (
    *(DriverMemory, DriverStreams, DriverKernels, DriverLibraries, DriverCollectives),
    DriverGraphs,
)
MOST_CALLS = 8


def calls(cls):
    """Return the public methods of a class by name, with their parameters."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    return {name: [*inspect.signature(f).parameters] for name, f in methods if name[0] != "_"}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_few_calls(role):
    assert 0 < len(calls(role)) <= MOST_CALLS


def test_each_call_has_one_role():
    assert [both for a, b in combinations(ROLES, 2) if (both := {*calls(a)} & {*calls(b)})] == []
    others = {*calls(CudaDriver)}.difference(*map(calls, ROLES))
    assert others == {"seen", "close"}


@pytest.mark.parametrize("driver", [CupyDriver, EmulatedDriver])
def test_a_driver_has_all_calls_with_their_parameters_and_no_others(driver):
    assert calls(driver) == calls(CudaDriver)
