"""Of some ways to do the same the first of the fastest is found, by a clock that tells what it is
told."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from actors.device.cuda.cublaslt import LibraryTrial, ProductChoices
from actors.device.cuda.cupy_driver import CupyDriver
from actors.device.cuda.driver import CudaError, TimedAlternatives


class Clock:
    """CUDA's calls; what a run takes is what it says, in milliseconds."""

    def __init__(self):
        self.took = [0.0]

    def __call__(self, name, *given):
        return self.took[-1] if name == "eventElapsedTime" else 1

    def taking(self, *milliseconds):
        left = list(milliseconds)
        return lambda stream: self.took.append(left.pop(0))


def failing(call):
    def run(stream):
        raise CudaError("not supported", code=15, call=call)

    return run


def fastest(clock, *runs):
    return LibraryTrial(None, clock).fastest_way(TimedAlternatives(lambda stream: None, runs))


def test_the_first_of_those_that_take_about_as_long_as_the_fastest_is_taken():
    clock = Clock()
    runs = [clock.taking(*[t] * 4) for t in (5.0, 2.01, 2.0)]
    assert fastest(clock, *runs) == 1


def test_the_first_run_of_a_way_does_not_count_nor_does_one_that_is_late():
    clock = Clock()
    assert fastest(clock, clock.taking(*[3.0] * 4), clock.taking(9.0, 2.0, 9.0, 2.0)) == 1


def test_a_way_that_the_library_refuses_when_it_runs_is_left_out():
    clock = Clock()
    assert fastest(clock, failing("cublasLtMatmul"), clock.taking(*[5.0] * 4)) == 1
    with pytest.raises(CudaError, match="not supported"):
        fastest(clock, failing("cublasLtMatmul"))
    with pytest.raises(CudaError, match="not supported"):
        fastest(clock, failing("launchKernel"), clock.taking(*[5.0] * 4))


@pytest.mark.parametrize("code", [0, 2, 719])
def test_a_way_is_chosen_once_but_where_there_is_no_room_to_try(code):
    clock, tried, kept = Clock(), [], ProductChoices(None, "a GPU")
    driver = SimpleNamespace(_product_choices=lambda: kept, _ask=clock)

    def trial():
        tried.append(code)
        if code:
            raise CudaError("no", code=code, call="malloc")
        slow, fast = (clock.taking(*[t] * 4) for t in (3.0, 2.0))
        return nullcontext(TimedAlternatives(lambda stream: None, (slow, fast)))

    if code == 719:
        with pytest.raises(CudaError):
            CupyDriver.choose_way(driver, "key", trial)
        return
    assert [CupyDriver.choose_way(driver, "key", trial) for _ in range(2)] == [int(not code)] * 2
    assert len(tried) == (2 if code else 1)
