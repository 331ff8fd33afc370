"""Whatever is handed to a job that is of the wrong kind is refused where the user wrote it."""

import functools
import os
import re

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

HERE = os.path.basename(__file__)
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
    "None": (None, "expected a model, came None; derive its class from af.nn.Module"),
    "a class": (Model, r"came the class Model itself; make one of it: Model\(...\)"),
    "a list": ([Model()], "came a list; keep the parts as attributes of one class"),
    "a dict": ({"a": Model()}, "came a dict; keep the parts"),
    "a function": (plain, "came the function plain; derive"),
    "a source": (source(), "came an ArraySource; the model comes first, the data after it"),
    "a text": ("model", "came a str; derive"),
}

SOURCES = {
    "None": (None, "expected a data source, came None; use af.data.Tokens"),
    "an array": (ARRAYS["x"], r"came a ndarray; wrap arrays: af.data.ArraySource"),
    "a dict of arrays": (ARRAYS, r"came a dict; wrap arrays: af.data.ArraySource"),
    "a list of batches": ([ARRAYS], "came a list; wrap what yields batches: af.data.from_iterable"),
    "a generator": ((ARRAYS for _ in range(3)), "came a generator; wrap what yields batches"),
    "a class": (Nearly, r"came the class Nearly itself; make one of it: Nearly\(...\)"),
    "a model": (Model(), "came a Model; the model comes first, the data after it"),
    "half a source": (Nearly(), r"came a Nearly, which has no restore\(\), fingerprint\(\); use"),
    "a path": ("data.npz", "came a str; use af.data.Tokens"),
}

CALLS = {
    "fit": lambda job, model, data: job.fit(model, data, steps=1, progress=False),
    "stream": lambda job, model, data: job.stream(model, data),
    "compile": lambda job, model, data: job.compile(model, data),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("call", [*CALLS, "step", "close"])
def test_what_is_no_model_is_refused(call, kind):
    model, words = MODELS[kind]
    calls = {
        **CALLS,
        "step": lambda job, model, data: job.step(model, {"x": ARRAYS["x"][:2]}),
        "close": lambda job, model, data: job.close(model),
    }
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: .*{words}"):
        calls[call](make_job(), model, source())


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("call", ["fit", "stream"])
def test_what_is_no_data_source_is_refused(call, kind):
    data, words = SOURCES[kind]
    with pytest.raises(af.DataError, match=rf"{HERE}:\d+: .*{words}"):
        CALLS[call](make_job(), Model(), data)


@pytest.mark.parametrize("kind", ["None", "an array", "a list of batches", "a class", "a path"])
def test_what_has_no_types_to_compile_for_is_refused(kind):
    with pytest.raises(af.DataError, match=rf"{HERE}:\d+: expected a data source, came"):
        make_job().compile(Model(), SOURCES[kind][0])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (None, r"spec\(\) of the Specs: expected \{name: af.TensorType\} of one entry or more"),
        ({}, r"spec\(\) of the Specs: expected .* came \{\}"),
        ({"x": ARRAYS["x"]}, r"expected \{name: af.TensorType\(.*came 'x': a ndarray"),
        ({"x": ("float32", (2, 2))}, "came 'x': a tuple"),
        ({1: SPEC["x"]}, "came 1: a TensorType"),
    ],
)
def test_a_source_that_tells_no_types_is_refused(spec, words):
    for call in CALLS.values():
        with pytest.raises(af.DataError, match=rf"{HERE}:\d+: .*{words}"):
            list(call(make_job(), Model(), Specs(spec)))


def test_arrays_in_the_place_of_types_are_refused_by_compile():
    with pytest.raises(af.DataError, match=rf"{HERE}:\d+: spec\['x'\]: expected TensorType"):
        make_job().compile(Model(), ARRAYS)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "expected a dict {name: array}, came NoneType"),
        (ARRAYS["x"], "expected a dict {name: array}, came ndarray"),
        ([ARRAYS, ARRAYS], "expected a dict {name: array}, came list"),
        ({"x": [1.0, 2.0]}, "a numpy array, came list"),
        ({"x": np.array(["a"])}, "expected one of the element types"),
    ],
)
def test_what_is_no_batch_is_refused_by_step(batch, words):
    with pytest.raises(af.DataError, match=rf"{HERE}:\d+: .*step of job 'train'") as caught:
        make_job().step(Model(), batch)
    assert words in str(caught.value)


def test_a_wrong_number_of_batches_is_refused_with_the_users_line():
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: step of job 'train': .*list of 2"):
        make_job(accumulate=2).step(Model(), ARRAYS)


@pytest.mark.parametrize("steps", ["10", None, 2.5, True, [3], -1, 1 << 50])
def test_what_is_no_number_of_steps_is_refused_before_anything_is_compiled(steps):
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: steps must be"):
        make_job().fit(Model(), source(), steps=steps)
    if steps is not None:
        with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: steps must be"):
            make_job().stream(Model(), source(), steps=steps)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"evaluation": valid}, "expected evaluation=af.Evaluation.*came a Job"),
        ({"evaluation": plain}, "expected evaluation=af.Evaluation.*came the function plain"),
        ({"evaluation": [1]}, "expected evaluation=af.Evaluation.*came a list"),
        ({"on_step": "print"}, "on_step must be a function, or None, got a str"),
        ({"checkpoint": 3}, "checkpoint must be a directory for the run, or None, got 3"),
    ],
)
def test_other_arguments_of_fit_are_checked(arguments, words):
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: {words}"):
        make_job().fit(Model(), source(), steps=1, progress=False, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"on_step": "print"}, "on_step must be a function"),
        ({"checkpoint": 3}, "checkpoint must be a directory"),
        ({"evaluation": valid}, "expected evaluation="),
        ({"on_step": lambda: 1}, r"on_step is called with \(step, results\): too many"),
        ({"on_nan": "ignore"}, "on_nan must be one of 'raise', 'warn', 'skip', got 'ignore'"),
        ({"keep_last": 0}, "keep_last must be an integer of 1 or more"),
        ({"on_save_error": "ignore"}, "on_save_error must be 'raise' or 'warn', got 'ignore'"),
        ({"every": "soon"}, "every: cannot read the checkpoint period 'soon'"),
    ],
)
def test_arguments_of_fit_are_checked_before_anything_is_traced(arguments, words):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        pytest.fail("traced")

    with pytest.raises(af.ActorflowError, match=rf"{HERE}:\d+: {words}"):
        train.fit(Model(), source(), steps=1, progress=False, **arguments)


@pytest.mark.parametrize("on_nan", ["ignore", "SKIP", None])
def test_a_policy_that_is_none_is_refused_by_compile_and_stream_too(on_nan):
    for call in (
        lambda: make_job().compile(Model(), source(), on_nan=on_nan),
        lambda: next(make_job().stream(Model(), source(), on_nan=on_nan)),
    ):
        with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: on_nan must be one of"):
            call()


@pytest.mark.parametrize("every", ["soon", 0, True])
def test_a_period_that_is_none_is_refused_by_compile_before_anything_is_traced(every):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        pytest.fail("traced")

    with pytest.raises(af.CheckpointError, match=rf"{HERE}:\d+: every: "):
        train.compile(Model(), source(), every=every)


def test_none_in_the_place_of_a_jobs_function_is_refused():
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: expected a function.*came None"):
        af.job(None)


def test_an_option_that_there_is_not_is_a_type_error_of_the_call():
    with pytest.raises(TypeError, match=r"job\(\) got an unexpected keyword argument 'optimiser'"):
        af.job(optimiser=None)
    with pytest.raises(TypeError, match=r"fit\(\) missing a required argument: 'steps'"):
        make_job().fit(Model(), source())


@pytest.mark.parametrize("rank", [-1, 1, "0", 1.0, True])
def test_what_is_no_rank_of_the_mesh_is_refused(rank):
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: rank must be an integer from 0 to 0"):
        make_job().compile(Model(), source(), rank=rank)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"job": plain}, af.CompileError, "came the function plain; decorate a function"),
        ({"job": None}, af.CompileError, "expected the job of an Evaluation, came None"),
        ({"job": "valid"}, af.CompileError, "came a str"),
        ({"data": ARRAYS}, af.DataError, "expected a data source, came a dict"),
        ({"data": None}, af.DataError, "expected a data source, came None"),
        ({"on_result": 3}, af.CompileError, "on_result of an Evaluation must be a function"),
        ({"every": "2"}, af.CompileError, "every of an Evaluation must be an integer"),
    ],
)
def test_an_evaluation_of_wrong_parts_is_refused(changes, error, words):
    parts = {"job": valid, "data": source(), "every": 1, "batches": 1, **changes}
    with pytest.raises(error, match=rf"{HERE}:\d+: .*{words}"):
        af.Evaluation(**parts)


@pytest.mark.parametrize("plan", [None, "job.plan", Model(), af.Plan])
def test_a_runner_of_what_is_no_plan_is_refused(plan):
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: expected a plan, came .*Plan.load"):
        af.Runner(plan)


@pytest.mark.parametrize("data", [None, ARRAYS, Nearly()])
def test_a_runner_refuses_what_is_no_data_source(data):
    runner = af.Runner(make_job().compile(Model(), source()))
    for call in (
        lambda: runner.fit(data, steps=1, progress=False),
        lambda: next(runner.stream(data)),
    ):
        with pytest.raises(af.DataError, match=rf"{HERE}:\d+: expected a data source"):
            call()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (3, "expected a function of .model, batch., came an int"),
        (lambda model: model, r"takes \(model, batch\), and '<lambda>' does not: missing|too many"),
        (lambda a, b, c: a, r"takes \(model, batch\), and '<lambda>' does not"),
    ],
)
def test_what_is_no_function_of_model_and_batch_is_refused(function, words):
    with pytest.raises(af.CompileError, match=rf"{HERE}:\d+: .*({words})"):
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
    with pytest.raises(af.CompileError, match=rf"{HERE}.*must be one, such as af.optim.AdamW"):
        af.job(plain, optimizer=af.optim.SGD)


def test_no_error_above_lacks_the_mend():
    for model, words in MODELS.values():
        with pytest.raises(af.CompileError) as caught:
            make_job().close(model)
        assert re.search(r"; \w+", str(caught.value)), words
