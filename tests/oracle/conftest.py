"""Cases against torch: against what is stored of it, or against torch itself with --torch.

A file of cases is called test_NAME.py and has CASES; each becomes a test in float32 and float64.
"""

import oracle
import pytest


def pytest_generate_tests(metafunc):
    if {"case", "dtype"} <= {*metafunc.fixturenames}:
        cases = metafunc.module.CASES
        marked = [
            pytest.param(case, id=case.name, marks=pytest.mark.no_gpu(why) if why else ())
            for case in cases
            for why in [getattr(case, "no_gpu", "")]
        ]
        metafunc.parametrize("case", marked)
        each_once = pytest.mark.thinned(2)  # the types in turn
        dtypes = [pytest.param(name, marks=each_once) for name in ("float32", "float64")]
        metafunc.parametrize("dtype", dtypes)


@pytest.fixture
def agrees(request):
    """Return a function that holds a case against torch, in a dtype."""
    name = request.module.__name__.rpartition("test_")[2]

    def run(case, dtype):
        assert case.num_sets >= oracle.FEWEST, f"{case.name} has {case.num_sets} argument sets"
        known = oracle.stored(name)
        assert case.name in known, f"nothing is stored of {case.name!r}: make oracle-store"
        if request.config.getoption("--torch"):
            import torch

            expected = oracle.torchs(case, torch)
            oracle.compare(case, dtype, expected)
            oracle.check_stored(known[case.name], expected)
        else:
            oracle.check(case, dtype, known[case.name])

    return run
