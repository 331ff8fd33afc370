from contextlib import ExitStack

import pytest
import ranks_in_process


@pytest.fixture
def served():
    """Return a function that serves a coordinator for so many ranks, and closes it at the end."""
    with ExitStack() as stack:

        def serve(num_ranks, **options):
            job = ranks_in_process.Served(num_ranks, **options)
            stack.callback(job.close)
            return job

        yield serve


@pytest.fixture
def members():
    """Return a function that returns the members of a job, all in this process."""
    with ExitStack() as stack:

        def make(num_ranks, **options):
            return stack.enter_context(ranks_in_process.joined(num_ranks, **options))

        yield make


@pytest.fixture
def at_once():
    """Run functions on threads of their own; return what each returned, or raised."""
    return ranks_in_process.at_once
