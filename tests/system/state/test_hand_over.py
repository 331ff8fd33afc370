"""What is handed out is read-only; what comes home comes home at once."""

import copy
import sys

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.nn import lease
from actorflow.run import open_model, runner

STEPS = 12


def test_arrays_are_read_only_and_do_not_change(mlp, classification, classify, bytes_of):
    model, train = mlp(), classify()
    result = train.fit(model, classification(), steps=2, progress=False)
    data, state = model.up.weight.data, model.state()
    before = bytes_of(state), data.tobytes()
    for array in (data, state["up.weight"], result.variables["up.weight"]):
        with raises(ValueError):
            array[:] = 0
    for _ in train.stream(model, classification(), steps=3):
        within = model.up.weight.data
        with raises(ValueError):
            within[:] = 0
    train.step(model, next(classification()))
    assert (bytes_of(state), data.tobytes()) == before
    train.close(model)


def test_a_model_that_is_loaded_with_one_wrong_array_keeps_all_its_values(
    mlp, classification, classify, bytes_of, filled
):
    model = mlp()
    classify().fit(model, classification(), steps=1, progress=False)
    before = model.state()
    with raises(af.CompileError):
        model.load({**filled(model, 7), "down.bias": np.zeros(4, np.float32)})
    assert bytes_of(model.state()) == bytes_of(before)


def test_a_copy_of_a_model_in_training_has_the_newest_values_and_a_life_of_its_own(
    mlp, classification, classify, twin
):
    model, expected = mlp(), twin({})
    for _ in classify().stream(model, classification(), steps=4):
        twin = copy.deepcopy(model)
    assert expected.step_of(twin.state()) == 4
    classify().fit(twin, classification(), steps=1, progress=False)
    assert expected.step_of(model.state()) == 4
    with raises(ValueError):
        twin.up.bias.data[:] = 1


def test_a_part_that_is_exchanged_in_the_loop_leaves_the_trained_one_its_values(
    mlp, classification, classify, twin, caplog
):
    model, expected = mlp(), twin({})
    trained = model.up
    for _ in classify().stream(model, classification(), steps=4):
        model.up = nn.Linear(8, 16)
    state = {**{f"up.{n}": a for n, a in trained.state().items()}}
    state |= {f"down.{n}": a for n, a in model.down.state().items()}
    assert expected.step_of(state) == 4
    assert model.up.weight.data is None
    (line,) = [r.getMessage() for r in caplog.records if "replaced" in r.getMessage()]
    assert "parameter 'up.weight', 'up.bias' was replaced or removed during stream of job" in line
    assert "test_hand_over.py:" in line


FILES = {module.__file__ for module in (lease, open_model, runner)}


def interrupted(call, at):
    """Call and raise KeyboardInterrupt where function number `at` of the hand-over returns.

    Return whether it came so far.
    """
    count = 0

    def profile(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename in FILES and event in ("return", "c_return"):
            count += 1
            if count == at:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_anywhere_in_the_hand_over_leaves_a_whole_model_that_can_be_trained(
    mlp, classification, classify, twin, bytes_of
):
    (first,) = twin({}, steps=1).states
    train, model, at, is_cut = classify(), mlp(), 0, True
    train.fit(model, classification(), steps=1, progress=False)
    start, came = model.state(), set()
    assert bytes_of(start) == first
    other = mlp()
    other.load(start)
    train.fit(other, classification(), steps=1, progress=False)
    trained = bytes_of(other.state())
    while is_cut:
        at += 3  # of some 400 places; the lease's own are all tried in its tests
        model.load(start)
        is_cut = interrupted(
            lambda: train.fit(model, classification(), steps=1, progress=False), at
        )
        state = bytes_of(model.state())
        assert state in (first, trained)
        came.add(state)
        train.fit(model, classification(), steps=1, progress=False)
    assert came == {first, trained}


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_step_that_is_interrupted_is_done_or_not(
    mlp, classification, classify, twin, options, has_begun, monkeypatch
):
    """An interrupt finds the caller where he waits for the outputs; the step goes on without."""
    train, model, data, expected = classify(**options), mlp(), classification(), twin(options)
    each = options.get("accumulate", 1)
    for _ in range(3):
        train.step(model, [next(data) for _ in range(each)])
    stepping = train._open.get(model).runner._plans.current

    def step(batches):
        if has_begun:
            for batch in batches:
                stepping._mailbox.put(batch)
            stepping.run.admit(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(stepping, "step", step)
    batches = [next(data) for _ in range(each)]
    with pytest.raises(KeyboardInterrupt):
        train.step(model, batches)
    assert expected.step_of(model.state()) == 3 + has_begun
    train.step(model, batches)
    train.close(model)
