"""Mutants of plan files, in children: a typed error, the same bits, or another plan; never more.

Here some of them, always the same; 100,000: `python benchmarks/fuzz_plans.py`.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiers

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
    names = ("gpt", "mlp", "accumulate", "streams", "bf16", "scan")
    count = tiers.size(1000, merge=120)
    tally = fuzz.campaign(tmp_path, names, range(count), 1, environ)
    failures = [text for kind in fuzz.BAD for text in tally.shown.get(kind, ())]
    assert not failures, "\n".join(failures)
    assert tally.outcomes["refused"] > count * 2 // 3
    assert tally.outcomes["equal"] > count // 30


def test_only_what_says_what_is_computed_may_change_a_result(fuzz):
    from fuzzing.trial import SAYS_WHAT, taking

    @dataclass(frozen=True)
    class Row:
        data: int
        place: int

    @dataclass(frozen=True)
    class Table:
        constants: tuple[Row, ...]
        fields: tuple[Row, ...]

    one = Table((Row(1, 1), Row(2, 2)), (Row(3, 3),))
    other = Table((Row(7, 7), Row(8, 8)), ())
    assert taking(one, other, "", SAYS_WHAT) == Table((Row(7, 1), Row(8, 2)), ())
    assert taking(one, other, "", {}) == one
