"""Loss curves against torch: against what is stored of it, or against torch itself with --torch.

A file of curves is called test_NAME.py and has CURVES; each becomes a test in its precisions.
"""

import curves
import pytest


def pytest_generate_tests(metafunc):
    if "curve" in metafunc.fixturenames:
        wanted = [(c, p) for c in metafunc.module.CURVES for p in c.precisions]
        ids = [f"{curve.name}-{precision}" for curve, precision in wanted]
        metafunc.parametrize(("curve", "precision"), wanted, ids=ids)


@pytest.fixture
def learns_as_torch(request):
    """Return a function that holds a curve against torch's, in a precision."""
    name = request.module.__name__.rpartition("test_")[2]

    def run(curve, precision):
        known = curves.stored(name)
        assert curve.name in known, f"nothing is stored of {curve.name!r}: make oracle-store"
        expected, apart = known[curve.name]["losses"], known[curve.name]["apart"]
        if request.config.getoption("--torch"):
            import torch

            expected = curves.torchs(curve, torch)
            for key, losses in expected.items():
                stored = known[curve.name]["losses"][key]
                assert losses == pytest.approx(stored, 1e-9), "make oracle-store"
        curves.check(curve, precision, expected, apart)

    return run
