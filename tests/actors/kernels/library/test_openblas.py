"""The threads of numpy's own BLAS, which belong to the process."""

import pytest

from actors.kernels.library import openblas

BEFORE = openblas.num_threads()
pytestmark = pytest.mark.skipif(BEFORE is None, reason="this numpy does not use OpenBLAS")


@pytest.fixture(autouse=True)
def _as_found():
    """Begin with three threads that nobody told us of, and leave what was there."""
    openblas.use_threads(None)
    before = openblas.num_threads()
    openblas.use_threads(3)
    openblas._state.num_threads_before = None
    yield
    openblas.use_threads(before)
    openblas._state.num_threads_before = None


def test_every_call_tells_the_library_whatever_others_told_it_since():
    openblas.use_one_thread()
    assert openblas.num_threads() == 1
    assert openblas.use_threads(2)
    assert openblas.num_threads() == 2
    openblas.use_one_thread()
    assert openblas.num_threads() == 1


def test_none_gives_back_what_was_there_before_the_first_call():
    openblas.use_one_thread()
    openblas.use_threads(2)
    openblas.use_threads(None)
    assert openblas.num_threads() == 3


def test_what_the_user_set_after_it_was_given_back_stands():
    openblas.use_one_thread()
    openblas.use_threads(None)
    openblas.use_threads(2)
    openblas._state.num_threads_before = None  # as if the user had told the library
    openblas.use_threads(None)
    assert openblas.num_threads() == 2
    openblas.use_one_thread()
    openblas.use_threads(None)
    assert openblas.num_threads() == 2


def test_without_openblas_nothing_is_told(monkeypatch):
    monkeypatch.setattr(openblas, "found", lambda: None)
    assert not openblas.use_threads(2)
    assert not openblas.use_threads(None)
    assert openblas.num_threads() is None
