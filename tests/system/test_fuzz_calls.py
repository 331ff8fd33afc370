"""Calls of all that is public with random arguments: results or typed errors that name the line.

Here some of them, always the same; 100,000: `python benchmarks/fuzz_calls.py`.
"""

import warnings

import pytest


@pytest.mark.host("on the host alone")
@pytest.mark.parametrize("part", range(4))
def test_a_call_comes_to_a_result_or_to_an_error_that_names_the_line(part):
    from fuzzing import call_trial
    from fuzzing.calls import drawn, subjects

    asked = [(kind, name, 1000 + n) for n, (kind, name) in enumerate(subjects())][part::8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = call_trial.tried([drawn(*one) for one in asked])
    lost = [
        f'python benchmarks/fuzz_calls.py --one "{" ".join(map(str, one))}"\n{outcome}: {words}'
        for one, (outcome, _, words) in zip(asked, found, strict=True)
        if outcome in call_trial.BAD
    ]
    assert not lost, "\n".join(lost)
    results = [outcome for outcome, _, _ in found if outcome == "result"]
    assert len(results) > len(found) // 4
