"""Parameters by patterns over their paths."""

import pytest
from error_texts import raises

from actorflow.environment.option_values import chosen, wrong_patterns
from compiler.contract.errors import CompileError

PATHS = ("body.0.weight", "body.0.bias", "head.weight", "head.bias", "scale")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("*", PATHS),
        ("head.*", ("head.weight", "head.bias")),
        (["head.*"], ("head.weight", "head.bias")),
        (["head.*", "!*.bias"], ("head.weight",)),
        (["!*.bias"], ("body.0.weight", "head.weight", "scale")),
        (["!*.bias", "head.bias"], ("body.0.weight", "head.weight", "head.bias", "scale")),
        ("body.?.weight", ("body.0.weight",)),
        (["*", "!*"], ()),
    ],
    ids=str,
)
def test_the_last_pattern_that_matches_a_path_decides(patterns, expected):
    assert chosen(patterns, PATHS, "here") == expected


@pytest.mark.parametrize("pattern", ["head.wieght", "head", "!haed.bias", "qqqqqq", "Head.*"])
def test_a_pattern_that_matches_nothing_names_what_is_near(pattern):
    with raises(CompileError):
        chosen(["scale", pattern], PATHS, "here")


@pytest.mark.parametrize("given", [[], (), "", "!", ["head.*", 3], 3, {"a"}, [""]], ids=str)
def test_what_is_no_pattern_is_told(given):
    assert "a pattern over paths" in wrong_patterns(given)


def test_a_model_without_parameters_has_nothing_near():
    with raises(CompileError):
        chosen("*", (), "here")
