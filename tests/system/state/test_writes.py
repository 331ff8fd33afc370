"""Whoever writes to a model in training is heard in the next step, and nothing is lost."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af

STEPS = 12


def told(metrics, model):
    """The numbers that all parameters had in a step."""
    return {round(metrics[n] / p.type.num_elements, 4) for n, p in model.named_parameters()}


def test_what_is_loaded_in_a_stream_is_trained_on_and_stays(
    mlp, classification, options, bytes_of, still, filled
):
    model, heard = mlp(), []
    for step, metrics in enumerate(still(**options).stream(model, classification(), steps=30)):
        heard.append(told(metrics, model))
        if step == 5:
            model.load(filled(model, 0.5))
            assert bytes_of(model.state()) == bytes_of(filled(model, 0.5))
    assert [len(numbers) for numbers in heard[-15:]] == [1] * 15
    assert heard[-1] == {0.5}
    first = heard.index({0.5})
    assert heard[first:] == [{0.5}] * (30 - first)  # from one step on, and all parameters at once
    assert bytes_of(model.state()) == bytes_of(filled(model, 0.5))


def test_what_is_assigned_in_on_step_is_trained_on_and_stays(mlp, classification, options, still):
    model, heard = mlp(), []

    def listen(step, metrics):
        heard.append(round(metrics["up.bias"] / 16, 4))
        if step == 5:
            model.up.bias.data = np.full(16, 0.25, np.float32)
            assert model.up.bias.data[0] == 0.25

    still(**options).fit(model, classification(), steps=30, progress=False, on_step=listen)
    assert (heard[4] != 0.25, heard[-1]) == (True, 0.25)
    assert model.up.bias.data[0] == 0.25


@pytest.mark.parametrize("way", ["data", "load", "many"])
def test_what_is_written_in_on_step_counts_from_the_very_next_step(
    mlp, classification, options, still, filled, way
):
    model, heard = mlp(), []

    def listen(step, metrics):
        heard.append(told(metrics, model))
        if step == 5 and way == "load":
            model.load(filled(model, 0.25))
        elif step == 5:
            for _, parameter in model.named_parameters():
                parameter.data = np.full(parameter.shape, 0.25, np.float32)
        elif way == "many":
            model.load(filled(model, step / 8))

    still(**options).fit(model, classification(), steps=9, progress=False, on_step=listen)
    if way == "many":
        assert heard[1:] == [{n / 8} if n != 5 else {0.25} for n in range(1, 9)]
    else:
        assert heard[4] != {0.25}
        assert heard[5:] == [{0.25}] * 4


def test_what_is_written_in_on_result_counts_from_the_very_next_step(
    mlp, classification, options, score, still, filled
):
    model, heard = mlp(), []
    watched = af.Evaluation(
        score, classification(seed=7), every=3, batches=2,
        on_result=lambda step, means: model.load(filled(model, step / 8)),
    )  # fmt: skip
    still(**options).fit(
        model, classification(), steps=9, progress=False, evaluation=watched,
        on_step=lambda step, metrics: heard.append(told(metrics, model)),
    )  # fmt: skip
    assert heard[3:] == [{3 / 8}] * 3 + [{6 / 8}] * 3


class Writing(af.data.ArraySource):
    """Whoever is given to `begin` is called before the second batch of the second evaluation."""

    def begin(self, write):
        self.num_given, self.write = 0, write

    def next_into(self, views):
        self.num_given += 1
        if self.num_given == 6:
            self.write()
        super().next_into(views)


def test_what_is_loaded_during_an_evaluation_waits_for_its_end(
    mlp, classification, options, score, still
):
    model, data = mlp(), classification(seed=7)
    data.__class__ = Writing
    new = np.arange(5, dtype=np.float32)

    def write():
        model.down.bias.data = new
        assert model.down.bias.data[4] == 4

    data.begin(write)
    watched = af.Evaluation(score, data, every=1, batches=4)
    results = [
        means["loss"]
        for _, means in still(**options)
        .fit(model, classification(), steps=4, progress=False, evaluation=watched)
        .evaluations
    ]
    assert results[0] == results[1] != results[2] == results[3]
    np.testing.assert_array_equal(model.down.bias.data, new)


def test_a_write_at_the_very_end_is_not_lost(mlp, classification, classify, filled):
    model = mlp()
    classify().fit(
        model, classification(), steps=3, progress=False,
        on_step=lambda step, _: model.load(filled(model, step)),
    )  # fmt: skip
    assert set(np.unique(model.down.bias.data)) == {3.0}


def test_frozen_parameters_are_read_and_written_like_others(mlp, classification, options, still):
    model = mlp()
    model.up.weight.freeze()
    sums = []
    for step, metrics in enumerate(still(**options).stream(model, classification(), steps=30)):
        sums.append(metrics["up.weight"])
        if step == 4:
            assert model.up.weight.data is not None
            model.up.weight.data = np.full((16, 8), 0.5, np.float32)
    assert sums[-1] == pytest.approx(64) != sums[4]
    assert model.up.weight.data[3, 3] == 0.5


def test_a_runner_reads_and_writes_its_variables_while_it_runs(mlp, classification, options, still):
    runner = af.Runner(still(**options).compile(mlp(), classification()))
    heard = []
    for step, metrics in enumerate(runner.stream(classification(), steps=30), 1):
        heard.append(round(metrics["up.bias"], 4))
        assert runner.variables()["step"] >= step
        if step == 4:
            runner.write({"up.bias": np.ones(16, np.float32)})
            assert runner.variables()["up.bias"].sum() == 16
    assert (heard[0] != 16, heard[-1]) == (True, 16)
    assert runner.variables()["up.bias"].sum() == 16
    for _ in runner.stream(classification(), steps=1):
        with raises(af.CompileError):
            runner.write({"up.bias": np.ones(3, np.float32)})


def test_a_value_of_another_type_is_refused_where_it_is_written(mlp, classification, still):
    runner = af.Runner(still().compile(mlp(), classification()))
    with raises(af.CompileError):
        runner.write({"up.weight": np.zeros((16, 8), np.float32), "up.bias": np.ones(3)})
    assert runner.variables()["up.weight"].any()


def test_two_calls_of_one_runner_at_once_are_refused(mlp, classification, classify):
    runner = af.Runner(classify().compile(mlp(), classification()))
    stream = runner.stream(classification(), steps=9)
    next(stream)
    with raises(af.CompileError):
        runner.fit(classification(), steps=5, progress=False)
    assert len(list(stream)) == 8
    assert runner.variables()["step"] == 9
