"""Parameters, submodules and optimizers that change between two steps."""

import numpy as np
import pytest

import actorflow as af

X = {"x": np.array([1.0, 2.0], np.float32)}

TRAIN = """
class Model(nn.Module):
    def __init__(self):
        self.a, self.b = ones(), nn.Parameter((2,), ZEROS)
    def __call__(self, x):
        return x * self.a + self.b

@af.job(optimizer=af.optim.SGD(0.1, momentum=0.9))
def train(model, batch):
    return model(batch.x).sum()

model = Model()
"""


def state_of(job, model):
    job.close(model)
    return {name: array.tolist() for name, array in model.state().items()}


def trained(job, model, steps=1):
    for _ in range(steps):
        job.step(model, X)
    return state_of(job, model)


def test_a_parameter_that_replaced_another_is_the_one_that_is_trained(program, said):
    module = program(TRAIN)
    job, model, orphan = module.train, module.model, module.model.a
    job.step(model, X)
    left = orphan.data.tolist()
    model.a = module.nn.Parameter((2,), module.ONES)
    model.a.data = np.array([5.0, 6.0], np.float32)
    job.step(model, X)
    (line,) = said()
    assert "job 'train' opened its plan again: parameter 'a' now another object" in line
    np.testing.assert_allclose(state_of(job, model)["a"], [4.9, 5.8], rtol=1e-6)
    np.testing.assert_allclose(model.state()["b"], -0.1 * (1 + 1.9) * np.ones(2), rtol=1e-6)
    assert orphan.data.tolist() == left


def test_a_replaced_parameter_without_data_begins_with_its_initialiser(program):
    module = program(TRAIN)
    job, model = module.train, module.model
    trained(job, model, 3)
    job.step(model, X)
    model.a = module.ones()
    np.testing.assert_allclose(trained(job, model)["a"], [0.9, 0.8], rtol=1e-6)


def test_a_parameter_replaced_while_another_call_traces_is_noticed_by_the_next_step(program):
    module = program(TRAIN)
    job, model, orphan = module.train, module.model, module.model.a
    job.step(model, X)
    left = orphan.data.tolist()
    model.a = module.ones()
    job.compile(model, {"x": af.TensorType(af.DType.FLOAT32, (2,))})
    np.testing.assert_allclose(trained(job, model)["a"], [0.9, 0.8], rtol=1e-6)
    assert orphan.data.tolist() == left


def test_swapped_parameters_keep_their_own_values_and_optimizer_state(program, said):
    module = program(TRAIN)
    job, model = module.train, module.model
    a, b = model.a, module.ones()
    model.b = b
    job.step(model, X)
    model.a, model.b = b, a
    job.step(model, X)
    (line,) = said()
    assert "parameter 'a' is what was 'b'; 'b' is what was 'a'" in line
    state_of(job, model)
    batch = X["x"]
    np.testing.assert_allclose(a.data, 1 - 0.1 * (batch + (0.9 * batch + 1)), rtol=1e-6)
    np.testing.assert_allclose(b.data, 1 - 0.1 * (1 + (0.9 + batch)), rtol=1e-6)


def test_a_submodule_that_replaced_another_is_the_one_that_is_trained(program, said):
    module = program(
        """
        class Model(nn.Module):
            def __init__(self):
                self.layer = nn.Linear(2, 2)
            def __call__(self, x):
                return self.layer(x.reshape(1, 2))

        @af.job(optimizer=af.optim.SGD(0.1, momentum=0.9))
        def train(model, batch):
            return model(batch.x).sum()

        model = Model()
        """
    )
    job, model, orphan = module.train, module.model, module.model.layer
    job.step(model, X)
    left = orphan.state()["weight"].tolist()
    model.layer = module.nn.Linear(2, 2)
    got, fresh = trained(job, model), module.Model()
    assert len(said()) == 1
    assert orphan.state()["weight"].tolist() == left
    assert got == trained(af.Job(job.function, job.options), fresh)


def test_a_parameter_frozen_between_steps_stays(program, said):
    module = program(TRAIN)
    job, model = module.train, module.model
    job.step(model, X)
    before = model.a.data.tolist()
    model.a.freeze()
    assert trained(job, model, 2)["a"] == before
    (line,) = said()
    assert "recompiled because parameter 'a' changed from float32[2] to float32[2] frozen" in line
    model.a.is_frozen = False
    assert trained(job, model)["a"] != before


SCHEDULES = {
    "a number of the optimizer": (
        "optimizer = af.optim.SGD(0.1)",
        "object.__setattr__(optimizer, 'lr', 0.2)",
        "optimizer.lr changed from 0.1 to 0.2",
    ),
    "a list that a schedule reads": (
        "RATES = [0.1, 0.1]\noptimizer = af.optim.SGD(lambda step: RATES[0])",
        "RATES[0] = 0.2",
        "global 'RATES' of demo[0] changed from 0.1 to 0.2",
    ),
    "a setting of a schedule that is an object": (
        "class Rate:\n"
        "    rate = 0.1\n"
        "    def __call__(self, step):\n"
        "        return step * 0.0 + self.rate\n"
        "rate = Rate()\noptimizer = af.optim.SGD(rate)",
        "rate.rate = 0.2",
        "optimizer.lr.rate (0.2) is new",
    ),
    "what a schedule of the library wraps": (
        "by = {'rate': 0.1}\n"
        "optimizer = af.optim.SGD(af.optim.warmup(lambda s: by['rate'], steps=1))",
        "by['rate'] = 0.2",
        "global 'by' of demo['rate'] changed from 0.1 to 0.2",
    ),
    "an optimizer of the user": (
        "class Mine:\n"
        "    rate = 0.1\n"
        "    def rules(self, trace, parameters):\n"
        "        return af.optim.SGD(self.rate).rules(trace, parameters)\n"
        "optimizer = Mine()",
        "Mine.rate = 0.2",
        "Mine.rate changed from 0.1 to 0.2",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_changed_optimizer_or_schedule_is_used_by_the_next_step(program, change, said, name):
    source, changed, words = SCHEDULES[name]
    text = TRAIN.replace("af.optim.SGD(0.1, momentum=0.9)", "optimizer")
    module = program(source + text)
    job, model = module.train, module.model
    np.testing.assert_allclose(trained(job, model)["b"], [-0.1, -0.1], rtol=1e-6)
    job.step(model, X)
    change(module, changed)
    np.testing.assert_allclose(trained(job, model)["b"], [-0.4, -0.4], rtol=1e-6)
    (line,) = said()
    assert f"recompiled because {words}" in line


def test_fit_and_an_evaluation_see_what_changed(program, said):
    module = program(
        """
        BY = 2.0
        class Model(nn.Module):
            def __init__(self):
                self.w = ones()
            def __call__(self, x):
                return x * self.w * BY

        @af.job(optimizer=af.optim.SGD(0.0))
        def train(model, batch):
            return model(batch.x).sum()

        @af.job(train=False)
        def valid(model, batch):
            return {"loss": model(batch.x).sum()}

        model = Model()
        """
    )

    def fit():
        data = [af.data.ArraySource({"x": np.ones((4, 2), np.float32)}, batch=1) for _ in range(2)]
        evaluation = af.Evaluation(module.valid, data[1], every=1, batches=1)
        result = module.train.fit(
            module.model, data[0], steps=1, progress=False, evaluation=evaluation
        )
        return result.metrics["loss"], result.evaluations[0][1]["loss"]

    assert fit() == (4.0, 4.0)
    module.BY = 3.0
    assert fit() == (6.0, 6.0)
    assert sum("global 'BY' of demo changed from 2.0 to 3.0" in w for w in said()) == 2
