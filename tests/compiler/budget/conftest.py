from functools import partial

import pytest

from compiler.budget.search import BudgetEvaluator
from compiler.lowering.lower import lower
from compiler.pipeline.pipeline import with_choice


@pytest.fixture(scope="session")
def budget_trials():
    """Return the trials of an ordered graph, with the real passes and the real lowering."""

    def make(graph, hardware, options):
        rewrite = partial(with_choice, graph, hardware=hardware, options=options)
        return BudgetEvaluator(
            graph, hardware, options, rewrite, lambda g: lower(g, hardware, options, "x")
        )

    return make
