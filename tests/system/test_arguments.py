"""Whatever is handed to a job that is of the wrong kind is refused where the user wrote it."""

import functools

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

ARRAYS = {"x": np.ones((8, 2), np.float32)}
SPEC = {"x": af.TensorType(af.DType.FLOAT32, (2, 2))}


class Model(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(2, 1)

    def __call__(self, x):
        return self.layer(x)


def make_job(**options):
    @af.job(optimizer=af.optim.SGD(0.1), **options)
    def train(model, batch):
        return model(batch.x).mean()

    return train


@af.job(train=False)
def valid(model, batch):
    return {"loss": model(batch.x).mean()}


def plain(model, batch):
    return model(batch.x).mean()


def source():
    return af.data.ArraySource(ARRAYS, batch=2)


class Nearly:
    """A source without `restore` and `fingerprint`."""

    def spec(self):
        return SPEC

    def __next__(self):
        return {"x": ARRAYS["x"][:2]}

    def state(self):
        return {}


class Specs(Nearly):
    """A source whose spec is given."""

    def __init__(self, given):
        self.given = given

    def spec(self):
        return self.given

    def restore(self, state):
        pass

    def fingerprint(self):
        return ""


MODELS = {
    "None": None,
    "a class": Model,
    "a list": [Model()],
    "a dict": {"a": Model()},
    "a function": plain,
    "a source": source(),
    "a text": "model",
}

SOURCES = {
    "None": None,
    "an array": ARRAYS["x"],
    "a dict of arrays": ARRAYS,
    "a list of batches": [ARRAYS],
    "a generator": (ARRAYS for _ in range(3)),
    "a class": Nearly,
    "a model": Model(),
    "half a source": Nearly(),
    "a path": "data.npz",
}

CALLS = {
    "fit": lambda job, model, data: job.fit(model, data, steps=1, progress=False),
    "stream": lambda job, model, data: job.stream(model, data),
    "compile": lambda job, model, data: job.compile(model, data),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("call", [*CALLS, "step", "close"])
def test_what_is_no_model_is_refused(call, kind):
    model = MODELS[kind]
    calls = {
        **CALLS,
        "step": lambda job, model, data: job.step(model, {"x": ARRAYS["x"][:2]}),
        "close": lambda job, model, data: job.close(model),
    }
    with raises(af.CompileError):
        calls[call](make_job(), model, source())


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("call", ["fit", "stream"])
def test_what_is_no_data_source_is_refused(call, kind):
    data = SOURCES[kind]
    with raises(af.DataError):
        CALLS[call](make_job(), Model(), data)


@pytest.mark.parametrize("kind", ["None", "an array", "a list of batches", "a class", "a path"])
def test_what_has_no_types_to_compile_for_is_refused(kind):
    with raises(af.DataError):
        make_job().compile(Model(), SOURCES[kind])


@pytest.mark.parametrize(
    "spec", [None, {}, {"x": ARRAYS["x"]}, {"x": ("float32", (2, 2))}, {1: SPEC["x"]}]
)
def test_a_source_that_tells_no_types_is_refused(spec):
    for call in CALLS.values():
        with raises(af.DataError):
            list(call(make_job(), Model(), Specs(spec)))


def test_arrays_in_the_place_of_types_are_refused_by_compile():
    with raises(af.DataError):
        make_job().compile(Model(), ARRAYS)


@pytest.mark.parametrize(
    "batch", [None, ARRAYS["x"], [ARRAYS, ARRAYS], {"x": [1.0, 2.0]}, {"x": np.array(["a"])}]
)
def test_what_is_no_batch_is_refused_by_step(batch):
    with raises(af.DataError):
        make_job().step(Model(), batch)


def test_a_wrong_number_of_batches_is_refused_with_the_users_line():
    with raises(af.CompileError):
        make_job(accumulate=2).step(Model(), ARRAYS)


@pytest.mark.parametrize("steps", ["10", None, 2.5, True, [3], -1, 1 << 50])
def test_what_is_no_number_of_steps_is_refused_before_anything_is_compiled(steps):
    with raises(af.CompileError):
        make_job().fit(Model(), source(), steps=steps)
    if steps is not None:
        with raises(af.CompileError):
            make_job().stream(Model(), source(), steps=steps)


@pytest.mark.parametrize(
    "arguments",
    [
        {"evaluation": valid},
        {"evaluation": plain},
        {"evaluation": [1]},
        {"on_step": "print"},
        {"checkpoint": 3},
    ],
)
def test_other_arguments_of_fit_are_checked(arguments):
    with raises(af.CompileError):
        make_job().fit(Model(), source(), steps=1, progress=False, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"on_step": "print"},
        {"checkpoint": 3},
        {"evaluation": valid},
        {"on_step": lambda: 1},
        {"on_nan": "ignore"},
        {"keep_last": 0},
        {"on_save_error": "ignore"},
        {"every": "soon"},
    ],
)
def test_arguments_of_fit_are_checked_before_anything_is_traced(arguments):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        pytest.fail("traced")

    with raises(af.ActorflowError):
        train.fit(Model(), source(), steps=1, progress=False, **arguments)


@pytest.mark.parametrize("on_nan", ["ignore", "SKIP", None])
def test_a_policy_that_is_none_is_refused_by_compile_and_stream_too(on_nan):
    for call in (
        lambda: make_job().compile(Model(), source(), on_nan=on_nan),
        lambda: make_job().stream(Model(), source(), on_nan=on_nan),
    ):
        with raises(af.CompileError):
            call()


@pytest.mark.parametrize("every", ["soon", 0, True])
def test_a_period_that_is_none_is_refused_by_compile_before_anything_is_traced(every):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        pytest.fail("traced")

    with raises(af.CheckpointError):
        train.compile(Model(), source(), every=every)


def test_none_in_the_place_of_a_jobs_function_is_refused():
    with raises(af.CompileError):
        af.job(None)


def test_an_option_that_there_is_not_is_a_type_error_of_the_call():
    with raises(TypeError):
        af.job(optimiser=None)
    with raises(TypeError):
        make_job().fit(Model(), source(), step=3)


@pytest.mark.parametrize("rank", [-1, 1, "0", 1.0, True])
def test_what_is_no_rank_of_the_mesh_is_refused(rank):
    with raises(af.CompileError):
        make_job().compile(Model(), source(), rank=rank)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"job": plain}, af.CompileError),
        ({"job": None}, af.CompileError),
        ({"job": "valid"}, af.CompileError),
        ({"data": ARRAYS}, af.DataError),
        ({"data": None}, af.DataError),
        ({"on_result": 3}, af.CompileError),
        ({"every": "2"}, af.CompileError),
    ],
)
def test_an_evaluation_of_wrong_parts_is_refused(changes, error):
    parts = {"job": valid, "data": source(), "every": 1, "batches": 1, **changes}
    with raises(error):
        af.Evaluation(**parts)


@pytest.mark.parametrize("plan", [None, "job.plan", Model(), af.Plan])
def test_a_runner_of_what_is_no_plan_is_refused(plan):
    with raises(af.CompileError):
        af.Runner(plan)


@pytest.mark.parametrize("data", [None, ARRAYS, Nearly()])
def test_a_runner_refuses_what_is_no_data_source(data):
    runner = af.Runner(make_job().compile(Model(), source()))
    for call in (
        lambda: runner.fit(data, steps=1, progress=False),
        lambda: next(runner.stream(data)),
    ):
        with raises(af.DataError):
            call()


@pytest.mark.parametrize("function", [3, lambda model: model, lambda a, b, c: a])
def test_what_is_no_function_of_model_and_batch_is_refused(function):
    with raises(af.CompileError):
        af.job(train=False)(function)


def test_a_partial_or_an_object_may_be_a_jobs_function():
    class Scaled:
        def __call__(self, model, batch):
            return {"loss": model(batch.x).mean()}

    def scaled(by, model, batch):
        return {"loss": (model(batch.x) * by).mean()}

    model = Model()
    for function, name in ((Scaled(), "Scaled"), (functools.partial(scaled, 2.0), "scaled")):
        job = af.job(train=False)(function)
        assert job.name == name
        assert np.isfinite(job.step(model, {"x": ARRAYS["x"][:2]})["loss"])
        job.close(model)


def test_the_class_of_an_optimizer_is_no_optimizer():
    with raises(af.CompileError):
        af.job(plain, optimizer=af.optim.SGD)


def test_no_error_above_lacks_the_mend():
    for model in MODELS.values():
        with raises(af.CompileError):
            make_job().close(model)
