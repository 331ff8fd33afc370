"""Two trainings of one model at once are refused, and what is left is whole."""

import gc
import threading

import numpy as np
import pytest
from error_texts import raises

import actorflow as af

STEPS = 12


def start_stream(job, model, data):
    stream = job.stream(model, data)
    next(stream)
    return stream


@pytest.mark.parametrize("call", ["fit", "stream", "step"])
@pytest.mark.parametrize("is_same_job", [True, False])
def test_a_second_training_of_a_model_in_a_stream_is_refused_with_both_lines(
    mlp, classification, classify, twin, call, is_same_job
):
    one, model, batch = classify(), mlp(), next(classification())
    two = one if is_same_job else classify()
    stream = start_stream(one, model, classification())
    calls = {
        "fit": lambda: two.fit(model, classification(), steps=1, progress=False),
        "stream": lambda: next(two.stream(model, classification())),
        "step": lambda: two.step(model, batch),
    }
    with raises(af.CompileError):
        calls[call]()
    next(stream)
    stream.close()
    assert twin({}, steps=40).step_of(model.state()) >= 2
    calls[call]()
    two.close(model)


def test_of_two_fits_of_one_model_in_two_threads_one_is_refused_and_the_other_is_right(
    mlp, classification, classify, twin
):
    model, refusals = mlp(), []
    both, held = threading.Barrier(2), threading.Event()

    def listen(step, metrics):
        if step == 1:
            assert held.wait(30)

    def train():
        both.wait()
        try:
            classify().fit(model, classification(), steps=STEPS, progress=False, on_step=listen)
        except af.CompileError as error:
            refusals.append(str(error))
            held.set()

    threads = [threading.Thread(target=train) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(refusals) == 1
    assert "fit of job 'train' cannot train parameter 'up.weight'" in refusals[0]
    assert twin({}).step_of(model.state()) == STEPS


def test_two_models_that_share_a_part_cannot_be_trained_at_once(mlp, classification, classify):
    one, two = mlp(), mlp()
    two.up = one.up
    stream = start_stream(classify(), one, classification())
    with raises(af.CompileError):
        classify().fit(two, classification(), steps=1, progress=False)
    stream.close()
    classify().fit(two, classification(), steps=2, progress=False)
    np.testing.assert_array_equal(one.state()["up.weight"], two.state()["up.weight"])


def test_two_models_are_trained_at_once_in_two_threads(mlp, classification, classify, twin):
    models, both = [mlp(), mlp()], threading.Barrier(2)

    def train(model):
        classify().fit(
            model, classification(), steps=STEPS, progress=False,
            on_step=lambda step, _: both.wait(30) if step == 1 else None,
        )  # fmt: skip

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [twin({}).step_of(model.state()) for model in models] == [STEPS, STEPS]


def test_a_stream_that_is_not_started_or_abandoned_holds_nothing(
    mlp, classification, classify, twin
):
    model, train = mlp(), classify()
    waiting = train.stream(model, classification())
    abandoned = start_stream(train, model, classification())
    del abandoned
    gc.collect()
    done = twin({}, steps=40).step_of(model.state())
    assert done >= 1
    train.fit(model, classification(), steps=1, progress=False)
    next(waiting)
    with raises(af.CompileError):
        train.fit(model, classification(), steps=1, progress=False)
    waiting.close()
    train.fit(model, classification(), steps=1, progress=False)


def test_the_model_is_the_streams_until_the_loop_ends_though_all_steps_are_done(
    mlp, classification, classify, twin
):
    train, model, batch, expected = classify(), mlp(), next(classification()), twin({})
    for _ in train.stream(model, classification(), steps=2):
        while expected.step_of(model.state()) < 2:
            pass  # the run is ahead of its outputs
        for _ in range(200):
            with raises(af.CompileError):
                train.step(model, batch)
    train.step(model, batch)
    train.close(model)


def test_threads_that_step_one_job_on_one_model_take_turns(mlp, classification, classify, bytes_of):
    train, model, batch = classify(optimizer=af.optim.SGD(0.01)), mlp(), next(classification())
    losses = []

    def work():
        losses.extend([train.step(model, batch)["loss"] for _ in range(10)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    twin, alone = mlp(), classify(optimizer=af.optim.SGD(0.01))
    expected = [alone.step(twin, batch)["loss"] for _ in range(30)]
    assert sorted(losses, reverse=True) == sorted(expected, reverse=True)
    assert bytes_of(model.state()) == bytes_of(twin.state())
    train.close(model)
    alone.close(twin)


@pytest.mark.parametrize("where", ["on_step", "on_result", "source"])
def test_a_run_that_fails_gives_the_model_back(
    mlp, classification, classify, twin, options, where, score
):
    model, expected = mlp(), twin(options, steps=60)

    def fail(*_):
        raise KeyError(expected.step_of(model.state()))

    class Source(type(classification())):
        def next_into(self, views):
            if len(seen) > 4:
                fail()
            super().next_into(views)

    seen, data = [], classification()
    data.__class__ = Source if where == "source" else type(data)
    watched = af.Evaluation(
        score, classification(seed=7), every=3, batches=2,
        on_result=fail if where == "on_result" else None,
    )  # fmt: skip

    def listen(step, metrics):
        seen.append(step)
        if where == "on_step" and step == 4:
            fail()

    with pytest.raises(KeyError) as caught:
        classify(**options).fit(
            model, data, steps=200, progress=False, on_step=listen, evaluation=watched
        )
    assert expected.step_of(model.state()) >= caught.value.args[0] >= 3
    classify().fit(model, classification(), steps=1, progress=False)


def test_a_run_that_cannot_start_holds_nothing(mlp, classification, classify):
    model = mlp()
    with raises(af.CompileError):
        classify().fit(model, classification(), steps=1, on_nan="what", progress=False)
    classify().fit(model, classification(), steps=1, progress=False)
