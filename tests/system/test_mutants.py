"""Every change of a launch, an operand or an edge of a real plan is refused, or changes no result.

Here a share of them; all: `python benchmarks/mutate_launches.py`.
"""

import mutate_launches as mutate
import pytest


@pytest.fixture(scope="module")
def subject():
    made = {}

    def make(name):
        if name not in made:
            made[name] = mutate.SUBJECTS[name]()
        return made[name]

    with mutate.surroundings():
        yield make


SHARES = {
    "dropped": 3, "swapped": 7, "doubled": 23, "moved": 101, "redirected": 97, "exchanged": 5,
    "renumbered": 23, "produced": 41, "unordered": 7, "misplaced": 19, "rehomed": 37,
    "overlaid": 101,
}  # fmt: skip
"""One mutant of each kind in so many is tried."""


NAMES = ["mlp", "gpt", "accumulate", "streams", "offload", "recompute", "skip", "all"]


@pytest.mark.thinned(3)
@pytest.mark.one_device("changes every launch of a plan that grows by copies")
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_plan_is_refused_or_computes_the_same(subject, name):
    num_refused = 0
    for kind, every in SHARES.items():
        tally = mutate.judge(subject(name), kind, every=every, offset=NAMES.index(name))
        assert not tally.lost
        num_refused += tally.counts["refused"]
    assert num_refused > 20


def test_the_tally_knows_a_mutant_that_computes_something_else(subject, monkeypatch):
    """The oracle itself: without a proof, a dropped launch is found by its results."""
    monkeypatch.setattr(mutate, "refusal", lambda plan: None)
    monkeypatch.setattr("actorflow.run.devices.prove", lambda plan: None)
    tally = mutate.judge(subject("mlp"), "dropped", every=9)
    assert tally.lost


def test_a_refusal_names_launch_op_and_line(subject):
    plan = subject("mlp").plan
    relus = [name for name, _ in mutate.dropped(plan) if "relu" in name]
    assert relus
    for name, mutant in mutate.dropped(plan):
        if name in relus:
            words = mutate.refusal(mutant)
            assert "mutate_launches.py:" in words
            assert words.startswith("launch ")
