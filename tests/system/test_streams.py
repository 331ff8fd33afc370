"""Steps on several compute streams: the same bits, and the same errors, as on one."""

import threading

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT, assert_same, losses_of_fit, rows_of_fit

import actorflow as af
from actorflow import nn
from actors.kernels.common.kernel import KernelNeeds
from actors.kernels.host import catalogue
from compiler.contract.plan_tables import ActorKind

pytestmark = pytest.mark.usefixtures("many_chains")


class Tower(nn.Module):
    def __init__(self, dropout):
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 6)
        self.drop = nn.Dropout(dropout)

    def __call__(self, x):
        return self.down(self.drop(af.relu(self.up(x))))


class TwoTowers(nn.Module):
    """Two networks that meet in the product of their outputs."""

    def __init__(self, dropout=0.2):
        self.left, self.right = Tower(dropout), Tower(dropout)

    def __call__(self, batch):
        score = (self.left(batch.a) * self.right(batch.b)).sum(-1)
        return af.square(score - batch.y).mean()


class TinyGPT(GPT):
    def __init__(self):
        super().__init__(17, seq=6, width=12, heads=3, dropout=0.2)

    def __call__(self, batch):
        return af.cross_entropy(super().__call__(batch.x).flatten(0, -2), batch.y.flatten())


class Classifier(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 5)

    def __call__(self, batch):
        return af.cross_entropy(self.down(af.relu(self.up(batch.a))), batch.c)


def pairs(seed=0):
    rng = np.random.default_rng(2)
    a, b = (rng.normal(size=(96, 8)).astype(np.float32) for _ in range(2))
    arrays = {"a": a, "b": b, "y": a[:, 0] * b[:, 0], "c": a.argmax(1).astype(np.int32) % 5}
    return af.data.ArraySource(arrays, batch=8, seed=seed)


def tokens(seed=0):
    return af.data.Tokens(np.random.default_rng(3).integers(0, 17, 3000), seq=6, batch=4, seed=seed)


MODELS = {"towers": (TwoTowers, pairs), "gpt": (TinyGPT, tokens), "mlp": (Classifier, pairs)}


def job(streams, **options):
    @af.job(optimizer=af.optim.AdamW(1e-2), streams=streams, seed=5, **options)
    def train(model, batch):
        return model(batch)

    return train


@af.job(train=False)
def evaluate(model, batch):
    return {"loss": model(batch)}


def run(train, name, steps, **options):
    make, data = MODELS[name]
    return rows_of_fit(train, make(), data(), steps, **options)


def compute_streams(plan):
    chosen = (ActorKind.COMPUTE, ActorKind.COPY)
    names = {plan.streams[a.stream].name for a in plan.actors if a.kind in chosen and a.launches}
    return sorted(names)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"accumulate": 2, "metrics_every": 3}], ids=str
)
def test_losses_and_variables_are_the_same_bits_on_any_number_of_streams(name, options):
    expected, first = run(job(1, **options), name, 6)
    for streams in (2, 3):
        train = job(streams, **options)
        make, data = MODELS[name]
        assert len(compute_streams(train.compile(make(), data()))) > 1
        rows, result = run(train, name, 6)
        assert rows == expected
        assert_same(result.variables, first.variables)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("streams", [2, 3])
def test_checkpoints_and_evaluations_are_the_same_bits_too_and_resume(name, streams, tmp_path):
    def evaluation():
        return af.Evaluation(evaluate, MODELS[name][1](seed=9), every=3, batches=2)

    expected, first = run(job(1), name, 10, evaluation=evaluation())
    rows, evaluations = [], ()
    for steps in (4, 10):
        part, result = run(
            job(streams), name, steps, checkpoint=tmp_path / "run", every=2,
            evaluation=evaluation(),
        )  # fmt: skip
        rows += part
        evaluations += result.evaluations
    assert rows == expected
    assert evaluations == first.evaluations
    assert_same(result.variables, first.variables)


def test_a_run_may_go_on_with_another_number_of_streams(tmp_path):
    expected, first = run(job(1), "towers", 9)
    rows = []
    for steps, streams in ((3, 1), (6, 3), (9, 2)):
        part, result = run(job(streams), "towers", steps, checkpoint=tmp_path / "run", every=1)
        rows += part
    assert rows == expected
    assert_same(result.variables, first.variables)


def test_step_and_stream_run_on_several_streams():
    expected, _ = run(job(1), "towers", 5)
    train = job(2)
    assert [m["loss"] for m in train.stream(TwoTowers(), pairs(), steps=5)] == [
        loss for _, loss in expected
    ]
    model, data = TwoTowers(), pairs()
    losses = [train.step(model, next(data))["loss"] for _ in range(5)]
    train.close(model)
    assert losses == [loss for _, loss in expected]


def test_outputs_that_several_streams_make_arrive_as_one_step():
    def metrics(streams):
        @af.job(optimizer=af.optim.SGD(0.01), streams=streams, metrics_every=2)
        def train(model, batch):
            left, right = model.left(batch.a), model.right(batch.b)
            loss = af.square((left * right).sum(-1) - batch.y).mean()
            return {"loss": loss, "left": left.mean(), "right": right.mean()}

        return train

    rows = {}
    for streams in (1, 2):
        train, rows[streams] = metrics(streams), []
        train.fit(
            TwoTowers(0.0), pairs(), steps=5, progress=False,
            on_step=lambda step, m, own=rows[streams]: own.append((step, dict(m))),
        )  # fmt: skip
    plan = metrics(2).compile(TwoTowers(0.0), pairs())
    sink = next(a for a in plan.actors if a.name == "metrics")
    assert len(sink.inputs) > 1
    assert rows[1] == rows[2]


class FailingOnce:
    """A kernel that raises once, at its third launch on a thread of the second stream."""

    name, op, failed_on = "elsewhere.tanh", "tanh", []

    def query(self, attrs, inputs, outputs):
        return KernelNeeds(duration_ns=1e6)

    def bind(self, attrs, inputs, outputs, workspace):
        (x,), (out,) = inputs, outputs
        launches = []

        def launch():
            thread = threading.current_thread().name
            if "compute 1" in thread and not self.failed_on:
                launches.append(thread)
                if len(launches) == 3:
                    self.failed_on.append(thread)
                    raise FloatingPointError("the kernel fails")
            np.tanh(x, out=out)

        return launch


@pytest.fixture
def failing():
    FailingOnce.failed_on.clear()
    yield af.kernel(FailingOnce)
    catalogue.unregister(FailingOnce.name)


class Rough(TwoTowers):
    def __call__(self, batch):
        left, right = af.tanh(self.left(batch.a)), af.tanh(self.right(batch.b))
        return af.square((left * right).sum(-1) - batch.y).mean()


def losses_of_rough(train):
    return losses_of_fit(train, Rough(), pairs(), 6)


@pytest.mark.host("streams of a device have no threads")
def test_a_kernel_that_raises_on_a_second_stream_reaches_the_caller_and_the_job_runs_again(
    failing, numpys_kernels, new_threads
):
    train = job(2)
    with raises(af.ActorFailed) as caught:
        losses_of_rough(train)
    assert failing.failed_on
    assert not new_threads()
    assert isinstance(caught.value.__cause__, FloatingPointError)
    plan = train.compile(Rough(), pairs())
    actor = next(a for a in plan.actors if a.name == caught.value.actor)
    assert plan.streams[actor.stream].name == "compute 1"
    assert actor.launches[caught.value.launch].op == "tanh"
    assert losses_of_rough(train) == losses_of_rough(job(1))


def test_a_plan_of_several_ranks_is_printed_and_not_run():
    plan = job(1, mesh=af.Mesh(data=4)).compile(TwoTowers(), pairs())
    assert [a.name for a in plan.actors if a.kind is ActorKind.COMM]
    with raises(af.CompileError):
        af.Runner(plan).fit(pairs(), steps=1, progress=False)


@pytest.mark.parametrize("options", [{"streams": 2}, {"streams": 1, "accumulate": 3}])
def test_the_state_read_right_after_a_step_is_that_of_a_run_that_ended_there(options):
    """Outputs of a step arrive when its updates are done, wherever these run."""
    source, each = pairs(), options.get("accumulate", 1)
    batches = [[next(source) for _ in range(each)] for _ in range(12)]
    train, model, states = job(**options), TwoTowers(), []
    for group in batches:
        train.step(model, group if each > 1 else group[0])
        states.append({name: array.copy() for name, array in model.state().items()})
    train.close(model)
    for steps in (1, 5, 12):
        ended = TwoTowers()
        job(**options).fit(ended, pairs(), steps=steps, progress=False)
        assert_same(ended.state(), states[steps - 1])


@pytest.mark.parametrize("options", [{"streams": 2}, {"streams": 2, "accumulate": 3}])
def test_a_listener_that_raises_leaves_what_was_learned(options):
    def fail(step, metrics):
        if step == 20:
            raise ZeroDivisionError("my own")

    model, untrained = TwoTowers(), TwoTowers()
    job(**options).fit(untrained, pairs(), steps=0, progress=False)
    with pytest.raises(ZeroDivisionError, match="my own"):
        job(**options).fit(model, pairs(), steps=60, progress=False, on_step=fail)
    kept = [
        not np.array_equal(array, untrained.state()[name]) for name, array in model.state().items()
    ]
    assert all(kept)
