"""What ranks tell of the batches that they are given: digests, of some of the steps."""

import numpy as np
import pytest

from actorflow.distributed.distributed_run import BatchDigestReporter, digest_of

X = np.arange(64, dtype=np.float32).reshape(16, 4)


def test_a_digest_is_of_names_types_and_values_whatever_their_layout():
    batch = {"x": X, "y": X[0]}
    same = {"y": X[0].copy(), "x": np.asfortranarray(X)}
    assert digest_of(batch) == digest_of(same)
    others = [
        {"x": X, "z": X[0]},
        {"x": X, "y": X[1]},
        {"x": X.astype(np.int32), "y": X[0]},
        {"x": X.reshape(4, 16), "y": X[0]},
    ]
    assert len({digest_of(one) for one in [batch, *others]}) == 5


def test_of_a_large_array_a_sample_is_read():
    large = np.zeros((512, 4096), np.float32)
    digest = digest_of({"x": large})
    assert digest_of({"x": np.asfortranarray(large)}) == digest
    assert digest_of({"x": large + 1}) != digest
    large[1::2] = 1
    assert digest_of({"x": large}) == digest


@pytest.mark.parametrize(
    ("is_every", "steps"), [(False, [*range(4, 12), 16, 32]), (True, [*range(4, 40)])]
)
def test_first_steps_are_told_then_some_and_all_where_the_user_makes_them(is_every, steps):
    told = []
    given = BatchDigestReporter(lambda *row: told.append(row), "a.py:1", 3, is_every=is_every)
    for step in range(4, 40):
        given.see(step, {"x": X}, is_last=True)
    assert [row[0] for row in told] == steps
    assert len({row[1:] for row in told}) == 1


def test_a_step_of_several_batches_is_told_once_with_all_of_them():
    told = []
    given = BatchDigestReporter(lambda *row: told.append(row), "", 0)
    for step, pair in enumerate([(X, X + 1), (X + 1, X), (X, X + 1)]):
        for x in pair:
            given.see(step + 1, {"x": x}, is_last=x is pair[1])
    first, other, same = [row[1] for row in told]
    assert first == same != other
