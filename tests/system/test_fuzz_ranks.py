"""Random small trainings on random meshes: the numbers of one rank, or an error with a line.

Here some of them, always the same; ACTORFLOW_FUZZ_RANKS=1000:3000 takes other seeds.
"""

import os
import re

import pytest
from random_trainings import differences, recipe

from compiler.contract.errors import CompileError

GIVEN = [int(n) for n in os.environ.get("ACTORFLOW_FUZZ_RANKS", "").split(":") if n]
KEPT = (13, 14, 1012, 1024, 2004, 9154, 50138, 60107, *range(70_000, 70_100))
SEEDS = range(*GIVEN) if GIVEN else KEPT


@pytest.mark.no_gpu("ranks meet in memory of the host")
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_compute_what_one_rank_computes_or_say_what_they_cannot(native_toolchain, seed):
    try:
        found = differences(recipe(seed))
    except CompileError as error:
        found = [] if re.search(r"\.py:\d+", str(error)) else [f"no line in: {error}"]
    assert not found, "\n".join([str(recipe(seed)), *found])
