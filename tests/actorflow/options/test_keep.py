"""Which checkpoints stay, by a table and by what any rule alone would keep."""

import pytest
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

import actorflow as af
from actorflow.options.run_spec import RunSpec

STEPS = [2, 4, 6, 8, 10]
LOSSES = {2: 5.0, 4: 1.0, 6: 3.0, 8: 1.0}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (af.Keep(last=2), {8, 10}),
        (af.Keep(last=1, best=1), {4, 10}),
        (af.Keep(last=1, best=2), {4, 8, 10}),
        (af.Keep(last=1, best=1, mode="max"), {2, 10}),
        (af.Keep(last=1, every=3), {6, 10}),
        (af.Keep(last=9, best=9), {*STEPS}),
    ],
    ids=str,
)
def test_a_checkpoint_stays_where_a_rule_names_it(rule, kept):
    assert rule.kept(STEPS, LOSSES) == kept


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(1, 60), st.floats(allow_nan=False, allow_infinity=False)),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_removing_after_each_step_loses_none_that_would_stay_at_the_end(losses, last, best):
    rule, kept = af.Keep(last=last, best=best), []
    for step in sorted(losses):
        kept = sorted(rule.kept([*kept, step], {s: losses[s] for s in [*kept, step]}))
    assert {*kept} == rule.kept(sorted(losses), losses)


@pytest.mark.parametrize(
    "options",
    [{"last": 0}, {"best": -1}, {"mode": "less"}, {"every": 0}, {"every": 2.5}],
    ids=str,
)
def test_a_rule_that_is_none_is_an_error(options):
    with raises(af.CompileError):
        af.Keep(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 3, "checkpoint": "run"},
        {"keep": af.Keep()},
        {"keep": af.Keep(), "keep_last": 2, "checkpoint": "run"},
        {"keep": af.Keep(best=1), "checkpoint": "run"},
    ],
    ids=["no_rule", "no_checkpoint", "both", "no_evaluation"],
)
def test_a_rule_without_what_it_needs_is_an_error_of_fit(options):
    with raises(af.CompileError):
        RunSpec(af.data.Tokens.from_text("x" * 100, seq=4, batch=2), steps=1, **options)
