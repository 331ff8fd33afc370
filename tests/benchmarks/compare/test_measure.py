"""Rows are measured with fake engines, which answer what they are told to."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from error_texts import raises

from benchmarks.compare.engines import Child, Engine, EngineError, LossMismatch
from benchmarks.compare.measure import BenchTask, Method, measure_row

FAKE = str(Path(__file__).with_name("fake_engine.py"))
TASK = BenchTask("gpt", "fp32", 100, "tokens")


class Fakes:
    """Starts fake engines: variant -> (loss, ms, verb that fails)."""

    def __init__(self, log, answers):
        self.log, self.answers, self.starts = log, answers, []

    def __call__(self, engine, task, variant, is_cold):
        self.starts.append((engine.name, variant, is_cold))
        loss, ms, fails_at = self.answers[engine.name, variant]
        command = (sys.executable, "-S", FAKE, str(loss), str(ms), str(self.log), fails_at)
        return Child(engine.name, (*command, f"{engine.name}{variant}"), os.environ)

    def asked(self):
        return self.log.read_text().split("\n")[:-1]


def engine(name, *variants, cached=False):
    return Engine(name, "", "", variants or ("",), (), ("CACHE",) if cached else ())


def measured(tmp_path, engines, answers, *, rounds=2, is_cold=False, is_busy=False, task=TASK):
    fakes = Fakes(tmp_path / "log", answers)
    method = Method(fakes, rounds, is_cold, is_busy, lambda text: None)
    return measure_row(task, engines, method), fakes


ABC = {("a", ""): (2.5, 4.0, ""), ("b", ""): (2.5, 8.0, ""), ("c", ""): (2.5, 6.0, "")}


def test_the_result_holds_times_ratios_and_bytes(tmp_path):
    result, _ = measured(tmp_path, [engine("a"), engine("b"), engine("c")], ABC)
    assert result.ours.engine == "a"
    assert [m.ms for m in (result.ours, *result.rivals)] == [4.0, 8.0, 6.0]
    assert (result.best_rival.engine, result.ratio_to_best_rival) == ("c", 1.5)
    assert result.items_per_s(result.ours) == 25_000
    assert result.gflops(result.ours) == 2e6 / 4e-3 / 1e9
    assert (result.ours.peak_rss_mb, result.ours.above_mb) == (9.0, 4.0)
    assert result.failures == ()


def test_turns_are_interleaved_and_every_second_round_goes_back(tmp_path):
    _, fakes = measured(tmp_path, [engine("a"), engine("b"), engine("c")], ABC, rounds=3)
    runs = [line.split()[0] for line in fakes.asked() if line.endswith(" run")]
    trials, rounds = runs[:6], runs[6:]
    assert trials == ["a", "a", "b", "b", "c", "c"]
    assert rounds == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


def test_losses_are_compared_before_anything_is_timed(tmp_path):
    answers = {("a", ""): (2.5, 4.0, ""), ("b", ""): (2.5005, 8.0, "")}
    with raises(LossMismatch):
        measured(tmp_path, [engine("a"), engine("b")], answers)
    asked = (tmp_path / "log").read_text().split("\n")
    assert "b losses" in asked
    assert not [line for line in asked if line.endswith(" run")]


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_a_difference(tmp_path, loss):
    answers = {("a", ""): (2.5, 4.0, ""), ("b", ""): (float(loss), 8.0, "")}
    with raises(LossMismatch):
        measured(tmp_path, [engine("a"), engine("b")], answers)


def test_bf16_has_a_wider_tolerance(tmp_path):
    answers = {("a", ""): (2.5, 4.0, ""), ("b", ""): (2.54, 8.0, "")}
    task = BenchTask("gpt", "bf16", 100, "tokens")
    result, _ = measured(tmp_path, [engine("a"), engine("b")], answers, task=task)
    assert result.ratio_to_best_rival == 2.0


def test_the_fastest_of_several_settings_is_measured_and_the_others_end(tmp_path):
    answers = ABC | {("b", "slow"): (2.5, 9.0, ""), ("b", "fast"): (2.5, 3.0, "")}
    result, fakes = measured(tmp_path, [engine("a"), engine("b", "slow", "fast")], answers)
    assert [(m.variant, m.ms) for m in result.rivals] == [("fast", 3.0)]
    assert fakes.asked().count("bslow run") == 2
    assert "bslow quit" not in fakes.asked()


@pytest.mark.parametrize("verb", ["first", "losses", "run", "quit"])
def test_an_engine_that_fails_is_named_with_its_message_and_the_others_go_on(tmp_path, verb):
    answers = ABC | {("b", ""): (2.5, 8.0, verb)}
    result, _ = measured(tmp_path, [engine("a"), engine("b"), engine("c")], answers)
    assert [m.engine for m in result.rivals] == ["c"]
    assert result.failures == ("b: ValueError: no such luck",)


def test_an_engine_that_dies_is_named_with_its_last_words(tmp_path):
    answers = ABC | {("b", ""): (2.5, 8.0, "die:losses")}
    result, _ = measured(tmp_path, [engine("a"), engine("b")], answers)
    (failure,) = result.failures
    assert failure == "b ended without an answer to 'losses': exit code 1; something broke"


def test_the_rivals_are_measured_where_ours_fails(tmp_path):
    answers = ABC | {("a", ""): (2.5, 8.0, "first")}
    result, _ = measured(tmp_path, [engine("a"), engine("b"), engine("c")], answers)
    assert result.ours is None
    assert [m.engine for m in result.rivals] == ["b", "c"]
    assert result.ratio_to_best_rival is None


def test_a_missing_environment_is_a_failure_of_that_engine_only(tmp_path):
    fakes = Fakes(tmp_path / "log", ABC)

    def start(engine, task, variant, is_cold):
        if engine.name == "b":
            raise EngineError("b has no environment")
        return fakes(engine, task, variant, is_cold)

    method = Method(start, 1, False, False, lambda text: None)
    result = measure_row(TASK, [engine("a"), engine("b"), engine("c")], method)
    assert result.failures == ("b has no environment",)
    assert result.ratio_to_best_rival == 1.5


@pytest.mark.parametrize("is_cold", [False, True])
def test_an_engine_with_a_cache_starts_once_to_fill_it_and_is_measured_warm(tmp_path, is_cold):
    result, fakes = measured(tmp_path, [engine("a", cached=True)], ABC, is_cold=is_cold)
    assert fakes.starts == [("a", "", is_cold), ("a", "", False)]
    assert (result.ours.cold_first_step_s is not None) == is_cold


def test_a_busy_core_gives_a_second_measurement(tmp_path):
    result, fakes = measured(tmp_path, [engine("a"), engine("b")], ABC, rounds=2, is_busy=True)
    assert (result.ours.busy_slowdown, result.rivals[0].busy_slowdown) == (1.0, 1.0)
    assert fakes.asked().count("a run") == 2 + 2 + 1


def test_a_row_that_trains_passes_by_an_engine_that_only_infers(tmp_path):
    engines = [engine("a"), replace(engine("b"), only_infers=True)]
    for is_training in (True, False):
        task = replace(TASK, is_training=is_training)
        result, _ = measured(tmp_path, engines, ABC, task=task)
        assert ([m.engine for m in result.rivals], result.failures) == (
            ["b"] * (not is_training),
            (),
        )


def test_a_row_passes_by_an_engine_that_is_not_compared_in_its_precision(tmp_path):
    fp32_only = Engine("b", "", "", ("",), precisions=("fp32",))
    task = BenchTask("gpt", "bf16", 100, "tokens")
    result, fakes = measured(tmp_path, [engine("a"), fp32_only, engine("c")], ABC, task=task)
    assert ([m.engine for m in result.rivals], result.failures) == (["c"], ())
    assert "b" not in [name for name, _, _ in fakes.starts]
