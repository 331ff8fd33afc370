"""Checkpoints that were changed and signed again: refused, replaced by older ones, or used as is.

Here a few hundred; more: `python benchmarks/mutate_checkpoints.py --mutants 10000`.
"""

from collections import Counter

import mutate_checkpoints as mutate
import pytest

from actorflow.checkpoint.manifest import Expected

COUNT = 60


@pytest.fixture(scope="module")
def own():
    return mutate.setting()


@pytest.mark.parametrize("first", range(0, 4 * COUNT, COUNT))
def test_no_mutant_is_lost(own, first):
    verdicts = [mutate.tried(own, index) for index in range(first, first + COUNT)]
    assert [(v.changes, v.reason) for v in verdicts if v.kind == "lost"] == []
    kinds = Counter(v.kind for v in verdicts)
    assert kinds["older"] > COUNT / 2
    assert kinds["newer"] > 0


def lost(own):
    return [v.reason for i in range(COUNT) if (v := mutate.tried(own, i)).kind == "lost"]


def test_a_reader_that_trusts_the_manifest_would_be_found_out(own, monkeypatch):
    monkeypatch.setattr(Expected, "check", lambda self, manifest: None)
    monkeypatch.setattr(Expected, "check_values", lambda self, manifest, tensors: None)
    assert lost(own)
