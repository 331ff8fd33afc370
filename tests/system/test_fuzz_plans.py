"""Mutants of plan files, in children: a typed error, the same bits, or another plan; never more.

Here a few of them, always the same; 100,000: `python benchmarks/fuzz_plans.py`.
"""

import os
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import fuzz_plans

        yield fuzz_plans
    sys.modules.pop("fuzz_plans", None)


def test_a_mutant_is_refused_or_runs_and_nothing_dies(fuzz, tmp_path, built_kernels):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "native").symlink_to(built_kernels, target_is_directory=True)
    is_native = os.environ.get("ACTORFLOW_NATIVE") != "0"
    environ = fuzz.environment(tmp_path, is_native=is_native)
    names = ("gpt", "mlp", "accumulate", "streams", "bf16")
    tally = fuzz.campaign(tmp_path, names, range(300), 1, environ)
    failures = [text for kind in fuzz.BAD for text in tally.shown.get(kind, ())]
    assert not failures, "\n".join(failures)
    assert tally.outcomes["refused"] > 200
    assert tally.outcomes["equal"] > 10


def test_a_result_that_differs_without_a_field_that_says_why_counts_as_lost(fuzz):
    tally = fuzz.Tally()
    tally.add("gpt", 1, "other", "actors.launches.attrs; memory.text", "")
    assert tally.num_lost == 0
    for fields in ("views.offset_bytes", "memory.text", "actors.launches.attrs; views.type.shape"):
        tally.add("gpt", 2, "other", fields, "")
    assert tally.outcomes["changed"] == tally.num_lost == 3
