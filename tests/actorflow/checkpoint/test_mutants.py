"""Checkpoints that were changed and signed again: refused, replaced by older ones, or used as is.

Here a few hundred; more: `python benchmarks/mutate_checkpoints.py --mutants 10000`.
"""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from actorflow.checkpoint.expected import Expected

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "mutate_checkpoints.py"
COUNT = 60


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate_checkpoints", SCRIPT)
    module = sys.modules["mutate_checkpoints"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutate_checkpoints"]


@pytest.fixture(scope="module")
def own(mutate):
    return mutate.setting()


@pytest.mark.parametrize("first", range(0, 4 * COUNT, COUNT))
def test_no_mutant_is_lost(mutate, own, first):
    verdicts = [mutate.tried(own, index) for index in range(first, first + COUNT)]
    assert [(v.changes, v.reason) for v in verdicts if v.kind == "lost"] == []
    kinds = Counter(v.kind for v in verdicts)
    assert kinds["older"] > COUNT / 2
    assert kinds["newer"] > 0


def lost(mutate, own):
    return [v.reason for i in range(COUNT) if (v := mutate.tried(own, i)).kind == "lost"]


def test_a_reader_that_trusts_the_manifest_would_be_found_out(mutate, own, monkeypatch):
    monkeypatch.setattr(Expected, "check", lambda self, manifest: None)
    monkeypatch.setattr(Expected, "check_values", lambda self, manifest, tensors: None)
    assert lost(mutate, own)
