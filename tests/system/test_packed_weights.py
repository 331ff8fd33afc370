"""Weights that an open plan alone has, as its kernels like them, until somebody asks for them."""

import copy
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actors.kernels.library import onednn

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(not onednn.is_available(), reason="oneDNN is not installed"),
]

PACKED = "first.weight"
"""Of a variable that the kernels keep in a layout of their own."""


class Net(nn.Module):
    def __init__(self):
        self.first = nn.Conv2d(5, 64, 3, stride=2, padding=1)
        self.second = nn.Conv2d(64, 80, (1, 3), padding=(0, 2), dilation=(1, 2), bias=False)

    def __call__(self, x):
        return self.second(af.relu(self.first(x)))


@af.job(train=False)
def predict(model, batch):
    return {"y": model(batch.x)}


@af.job(train=False)
def sizes(model, batch):
    return {"y": model(batch.x), "size": (model.first.weight**2).sum()}


@af.job(optimizer=af.optim.SGD(0.05))
def train(model, batch):
    return (model(batch.x) ** 2).mean()


def pictures(count=1, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((count, 5, 17, 17)).astype(np.float32)}


def odd_values():
    """Return a model, with values whose bits say whether they were only moved, and copies."""
    model = Net().init(0)
    weight = np.array(model.first.weight.data)
    weight.reshape(-1)[:3] = -0.0, np.float32(1e-42), -1e-45
    model.first.weight.data = weight
    return model, {name: array.copy() for name, array in model.state().items()}


def bits(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


def fresh(arrays, batch):
    """Return what a plan of its own makes of a batch with some values."""
    model = Net()
    model.load(arrays)
    with predict.predictor(model, batch) as call:
        return call(batch)["y"]


@pytest.fixture(autouse=True)
def plans():
    """Close what a test has opened."""
    models = []
    yield models
    for model in models:
        for job in (predict, sizes, train):
            job.close(model)


def test_the_models_array_goes_when_the_plan_has_it_packed():
    model, before = odd_values()
    plain = weakref.ref(model.state()[PACKED])
    small = weakref.ref(model.state()["first.bias"])
    with predict.predictor(model, pictures()) as call:
        first = call(pictures())["y"]
        assert plain() is None
        assert small() is not None
        np.testing.assert_array_equal(call(pictures())["y"], first)
        np.testing.assert_array_equal(first, fresh(before, pictures()))


def test_who_reads_gets_the_bits_and_the_model_keeps_them():
    model, before = odd_values()
    with predict.predictor(model, pictures()) as call:
        first = call(pictures())["y"]
        read = model.state()
        assert bits(read) == bits(before)
        np.testing.assert_array_equal(call(pictures())["y"], first)
        assert model.state()[PACKED] is read[PACKED]
    assert model.state()[PACKED] is read[PACKED]


def test_an_array_that_a_user_has_read_before_stays_as_it_was():
    model, before = odd_values()
    mine = model.state()
    with predict.predictor(model, pictures()) as call:
        call(pictures())
        assert bits(mine) == bits(before)


def test_the_end_of_a_plan_brings_the_values_home():
    model, before = odd_values()
    with predict.predictor(model, pictures()) as call:
        call(pictures())
    assert bits(model.state()) == bits(before)


@pytest.mark.parametrize("reads", ["nobody", "the writer", "another"])
def test_values_that_are_written_count_from_the_next_step_on(reads):
    model, before = odd_values()
    with predict.predictor(model, pictures()) as call:
        call(pictures())
        weight = np.random.default_rng(1).standard_normal(before[PACKED].shape, np.float32)
        model.first.weight.data = weight
        if reads == "the writer":
            assert model.state()[PACKED].tobytes() == weight.tobytes()
        elif reads == "another":
            assert model.state()["second.weight"].tobytes() == before["second.weight"].tobytes()
        expected = fresh({**before, PACKED: weight}, pictures())
        for _ in range(2):
            np.testing.assert_array_equal(call(pictures())["y"], expected)
        assert bits(model.state()) == bits({**before, PACKED: weight})


def test_a_training_goes_on_from_the_same_bits(plans):
    (model, _), (other, _) = odd_values(), odd_values()
    plans += [model, other]
    for seed in range(3):
        predict.step(model, pictures())
        ours, theirs = [train.step(m, pictures(2, seed))["loss"] for m in (model, other)]
        assert ours == theirs
    assert bits(model.state()) == bits(other.state())
    now = {name: array for name, array in model.state().items() if name in Net().init(0).state()}
    np.testing.assert_array_equal(predict.step(model, pictures())["y"], fresh(now, pictures()))


@pytest.mark.parametrize("call", ["step", "fit"])
def test_a_training_takes_the_values_from_a_plan_that_another_thread_steps(plans, call):
    model, before = odd_values()
    plans.append(model)
    with ThreadPoolExecutor(1) as service:
        first = service.submit(predict.step, model, pictures()).result()["y"]
        if call == "step":
            train.step(model, pictures(2))
        else:
            data = af.data.ArraySource(pictures(2), batch=2)
            train.fit(model, data, steps=1, progress=False)
        after = model.state()
        assert after[PACKED].tobytes() != before[PACKED].tobytes()
        now = service.submit(predict.step, model, pictures()).result()["y"]
    assert (now != first).any()
    np.testing.assert_array_equal(now, fresh(after, pictures()))


def test_plans_for_several_batches_take_turns(plans):
    model, before = odd_values()
    plans.append(model)
    for count in (1, 2, 1, 2):
        batch = pictures(count, count)
        np.testing.assert_array_equal(predict.step(model, batch)["y"], fresh(before, batch))
    assert bits(model.state()) == bits(before)


def test_several_predictors_of_a_model_are_right():
    model, before = odd_values()
    batches = [pictures(count, count) for count in (1, 2)]
    expected = [fresh(before, batch) for batch in batches]
    with predict.predictor(model, batches[0]) as one, predict.predictor(model, batches[1]) as two:
        for _ in range(3):
            np.testing.assert_array_equal(one(batches[0])["y"], expected[0])
            np.testing.assert_array_equal(two(batches[1])["y"], expected[1])
    assert bits(model.state()) == bits(before)


def test_a_weight_that_something_else_reads_stays(plans):
    model, before = odd_values()
    plans.append(model)
    plain = weakref.ref(model.state()[PACKED])
    for _ in range(2):
        out = sizes.step(model, pictures())
        assert plain() is not None
        np.testing.assert_allclose(out["size"], (before[PACKED].astype(float) ** 2).sum(), 1e-5)


def test_a_copy_of_the_model_has_the_values(plans):
    model, before = odd_values()
    plans.append(model)
    predict.step(model, pictures())
    assert bits(copy.deepcopy(model).state()) == bits(before)


def test_a_parameter_of_two_models_outlives_one_of_them():
    model, before = odd_values()
    other = Net().init(1)
    other.first = model.first
    predict.step(model, pictures())
    del model
    assert other.state()[PACKED].tobytes() == before[PACKED].tobytes()


def test_threads_that_read_while_others_step_get_the_bits():
    model, before = odd_values()
    with predict.predictor(model, pictures()) as call:
        expected = call(pictures())["y"]
        seen = []
        reader = threading.Thread(target=lambda: seen.append(bits(model.state())))
        reader.start()
        for _ in range(5):
            np.testing.assert_array_equal(call(pictures())["y"], expected)
        reader.join()
    assert seen == [bits(before)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_child_reads_them(plans):
    model, before = odd_values()
    plans.append(model)
    predict.step(model, pictures())
    child = os.fork()
    if not child:
        try:
            os._exit(0 if bits(model.state()) == bits(before) else 3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bits(model.state()) == bits(before)
