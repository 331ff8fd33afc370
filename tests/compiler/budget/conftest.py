from functools import partial

import pytest

from compiler.budget.trials import Trials
from compiler.lowering.lower import lower
from compiler.pipeline import with_choice


@pytest.fixture(scope="session")
def budget_trials():
    """Return the trials of an ordered graph, with the real passes and the real lowering."""

    def make(graph, target, options):
        rewrite = partial(with_choice, graph, target=target, options=options)
        return Trials(graph, target, options, rewrite, lambda g: lower(g, target, options, "x"))

    return make
