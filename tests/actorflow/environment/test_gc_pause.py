import gc

import pytest

from actorflow.environment.settings import collector_paused


@pytest.fixture(autouse=True)
def collector_as_it_was():
    was_enabled = gc.isenabled()
    yield
    if was_enabled:
        gc.enable()
    else:
        gc.disable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_pauses_and_is_left_as_it_was(is_enabled):
    if is_enabled:
        gc.enable()
    else:
        gc.disable()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == is_enabled


def test_an_error_leaves_the_collector_as_it_was():
    gc.enable()
    with pytest.raises(ValueError, match="stop"), collector_paused():
        raise ValueError("stop")
    assert gc.isenabled()


def test_a_decorated_function_runs_without_the_collector_every_time():
    gc.enable()
    run = collector_paused()(gc.isenabled)
    assert [run(), run(), gc.isenabled()] == [False, False, True]
