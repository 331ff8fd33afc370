"""Jobs whose batches change their shape: several plans, open on one set of variables."""

import gc
import os
import sys
import threading
from itertools import accumulate

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.compile.plan_facts import state_layout
from actorflow.data import from_iterable
from actorflow.run.live_variables import LiveVariables
from actorflow.run.open_plans import OpenPlans
from actorflow.run.stepping import Stepping
from actors.device.host import HostDevice
from actors.loop.bound import VariableMemory

ROWS = (4, 6, 3)
ORDER = (4, 6, 4, 3, 6, 6, 3, 4)


class Net(nn.Module):
    """Two layers with dropout between them, and a buffer that counts rows."""

    def __init__(self):
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 5)
        self.rows = nn.Buffer((), dtype="int64")

    def __call__(self, x):
        self.rows.assign(self.rows + x.shape[0])
        return self.b(af.dropout(af.gelu(self.a(x)), 0.3))


class Plain(nn.Module):
    """One layer, which is updated after all that can fail."""

    def __init__(self):
        self.a = nn.Linear(8, 5)

    def __call__(self, x):
        return self.a(x)


def make_job(**options):
    @af.job(**{"optimizer": af.optim.AdamW(1e-2), **options})
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return train


def batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 5, rows).astype(np.int32)}


def spec(rows):
    float32, int32 = af.DType.FLOAT32, af.DType.INT32
    return {"x": af.TensorType(float32, (rows, 8)), "y": af.TensorType(int32, (rows,))}


def one_by_one(job, order, num_batches=1):
    """Return losses and variables of a training in which each step has a runner of its own."""
    plans = {rows: job.compile(Net(), spec(rows)) for rows in ROWS}
    values, losses = None, []
    for number, rows in enumerate(order):
        runner = af.Runner(plans[rows], values=values)
        batches = [batch(rows, number * num_batches + i) for i in range(num_batches)]
        losses.append(runner.step(batches)["loss"])
        runner.close()
        values = runner.variables()
    return losses, values


def stepped(job, model, order, num_batches=1):
    losses = []
    for number, rows in enumerate(order):
        batches = [batch(rows, number * num_batches + i) for i in range(num_batches)]
        losses.append(job.step(model, batches)["loss"])
    return losses


def assert_state(model, values):
    state = model.state()
    assert {n: a.tobytes() for n, a in state.items()} == {n: values[n].tobytes() for n in state}


@pytest.mark.parametrize(
    "options",
    [{}, {"max_plans": 2}, {"accumulate": 2}, {"precision": "bf16", "ema": 0.9}],
    ids=["plain", "two open", "accumulate", "bf16"],
)
def test_steps_of_several_shapes_have_the_bits_of_plans_opened_one_by_one(options):
    job, model = make_job(**options), Net()
    num_batches = options.get("accumulate", 1)
    losses, values = one_by_one(make_job(**options), ORDER, num_batches)
    assert stepped(job, model, ORDER, num_batches) == losses
    assert_state(model, values)
    assert values["step"] == len(ORDER)
    job.close(model)


def test_plans_of_one_job_have_their_variables_at_the_same_places():
    job = make_job(clip_norm=1.0)
    layouts = {state_layout(job.compile(Net(), spec(rows))) for rows in ROWS}
    assert len(layouts) == 1


def test_values_written_and_read_between_shapes_are_those_of_the_run():
    # With one plan at a time the other job reloads each plan when its shape comes again.
    job, other, model, twin = make_job(), make_job(max_plans=1), Net(), Net()
    for number, rows in enumerate(ORDER):
        loss = job.step(model, batch(rows, number))["loss"]
        assert other.step(twin, batch(rows, number))["loss"] == loss
        weights = model.state()["a.weight"]
        assert weights.tobytes() == twin.state()["a.weight"].tobytes()
        for net in (model, twin):
            net.load({**net.state(), "a.weight": weights * np.float32(0.5)})
    job.close(model)
    other.close(twin)
    assert_state(model, twin.state())


def test_a_job_that_predicts_sees_each_step_of_one_that_trains():
    @af.job(train=False)
    def predict(model, batch):
        return model.b(af.gelu(model.a(batch.x)))

    job, model = make_job(), Net()
    for number, rows in enumerate(ORDER):
        job.step(model, batch(rows, number))
        x = batch(rows + 1, number)
        fresh = Net()
        fresh.load(model.state())
        expected = predict.step(fresh, {"x": x["x"]})["output"]
        predict.close(fresh)
        np.testing.assert_array_equal(predict.step(model, {"x": x["x"]})["output"], expected)
    job.close(model)
    predict.close(model)


@pytest.mark.host("a device that fails takes the variables along")
def test_a_refused_batch_between_shapes_changes_nothing():
    job, other, model, twin = make_job(), make_job(), Plain(), Plain()
    for number, rows in enumerate(ORDER):
        good = batch(rows, number)
        with pytest.raises(af.ActorFailed):
            job.step(model, {**good, "y": np.full(rows, 9, np.int32)})
        assert job.step(model, good)["loss"] == other.step(twin, good)["loss"]
    job.close(model)
    other.close(twin)
    assert_state(model, twin.state())


def num_open():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_switches_open_nothing_and_closing_ends_all():
    job, model = make_job(), Net()
    before = num_open()
    stepped(job, model, ROWS * 2)
    held = num_open()
    stepped(job, model, ROWS * 30)
    assert num_open() == held
    job.close(model)
    assert num_open() == before


def test_a_new_shape_is_said_once_with_what_it_took(caplog):
    job, model = make_job(), Net()
    stepped(job, model, ORDER * 2)
    job.close(model)
    said = [text for text in caplog.messages if "recompiled because" in text]
    assert len(said) == len(ROWS) - 1
    assert "batch['x'] changed from float32[4, 8] to float32[6, 8]; that took " in said[0]


def test_threads_that_step_one_job_with_other_shapes_take_turns():
    job, model, errors = make_job(optimizer=af.optim.SGD(0.0)), Net(), []

    def work(first):
        try:
            for number in range(8):
                job.step(model, batch(ROWS[(first + number) % len(ROWS)]))
        except Exception as error:  # shown by the assertion
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.close(model)
    assert errors == []
    assert model.state()["rows"] == sum(
        ROWS[(k + n) % len(ROWS)] for k in range(3) for n in range(8)
    )


# -- fit and stream ------------------------------------------------------------------------------


def source(order=ORDER, num_batches=1, most=None):
    """Return a source whose batches have the rows of an order, which ends after `most` of them."""
    numbers = [
        (rows, n * num_batches + i) for n, rows in enumerate(order) for i in range(num_batches)
    ]
    return from_iterable(
        lambda: iter([batch(*number) for number in numbers[:most]]), [spec(rows) for rows in ROWS]
    )


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["plain", "accumulate"])
def test_fit_over_several_shapes_has_the_bits_of_plans_opened_one_by_one(options):
    num_batches, model, heard = options.get("accumulate", 1), Net(), []
    losses, values = one_by_one(make_job(**options), ORDER, num_batches)
    result = make_job(**options).fit(
        model,
        source(num_batches=num_batches),
        steps=len(ORDER),
        progress=False,
        on_step=lambda step, metrics: heard.append((step, metrics["loss"])),
    )
    assert heard == list(enumerate(losses, 1))
    assert_state(model, values)
    assert (result.last_step, result.metrics["loss"]) == (len(ORDER), losses[-1])
    assert {n: a.tobytes() for n, a in result.variables.items()} == {
        n: a.tobytes() for n, a in values.items()
    }


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_run_that_resumes_at_a_switch_has_the_bits_of_one_that_was_never_stopped(stop, tmp_path):
    losses, values = one_by_one(make_job(), ORDER)
    options = {"checkpoint": tmp_path / "run", "every": 2, "progress": False}
    make_job().fit(Net(), source(), steps=stop, **options)
    model, heard = Net(), []
    result = make_job().fit(
        model,
        source(),
        steps=len(ORDER),
        on_step=lambda step, metrics: heard.append(metrics["loss"]),
        **options,
    )
    assert (result.first_step, heard) == (stop, losses[stop:])
    assert_state(model, values)
    # Nothing is left to do, and the model has what was trained.
    again = Net()
    assert make_job().fit(again, source(), steps=len(ORDER), **options).first_step == len(ORDER)
    assert_state(again, values)


def test_a_source_that_ends_or_fails_keeps_the_steps_before(tmp_path):
    losses, _ = one_by_one(make_job(), ORDER[:5])
    short, failing = Net(), Net()
    result = make_job().fit(short, source(most=5), steps=8, progress=False)
    assert (result.last_step, result.metrics["loss"]) == (5, losses[-1])
    assert 0 < result.data_wait < 1, "a thread reads while plans are made"

    def rows():
        yield from [batch(r, n) for n, r in enumerate(ORDER[:5])]
        raise KeyError("no more")

    broken = from_iterable(rows, [spec(r) for r in ROWS])
    with pytest.raises(KeyError, match="no more"):
        make_job().fit(failing, broken, steps=8, progress=False, checkpoint=tmp_path / "run")
    assert_state(failing, short.state())
    rest = make_job().fit(Net(), source(), steps=5, progress=False, checkpoint=tmp_path / "run")
    assert rest.first_step == 5


def test_on_step_reads_writes_and_stops_between_shapes():
    model, seen = Net(), []

    def on_step(step, metrics):
        seen.append(model.state()["rows"].item())
        model.load({**model.state(), "rows": np.asarray(100 * step, np.int64)})
        if step == 4:
            raise af.StopTraining("enough")

    result = make_job().fit(model, source(), steps=8, progress=False, on_step=on_step)
    assert result.last_step == 4
    assert seen == [4, 106, 204, 303]
    assert model.state()["rows"] == 400


def test_a_step_of_batches_of_two_shapes_is_refused():
    with raises(af.DataError):
        make_job(accumulate=2).fit(Net(), source((4, 6, 6, 4)), steps=2, progress=False)


def test_a_loss_that_is_not_finite_is_told_with_its_step():
    bad = [batch(rows, n) for n, rows in enumerate(ORDER)]
    bad[3]["x"][:] = np.nan
    data = from_iterable(lambda: iter(bad), [spec(rows) for rows in ROWS])
    with pytest.raises(af.NonFiniteLoss, match="at step 4"):
        make_job().fit(Net(), data, steps=8, progress=False)


def test_skipped_steps_are_counted_over_shapes():
    bad = [batch(rows, n) for n, rows in enumerate(ORDER)]
    for number in (2, 3, 7):
        bad[number]["x"][:] = np.nan
    data = from_iterable(lambda: iter(bad), [spec(rows) for rows in ROWS])
    result = make_job().fit(Net(), data, steps=8, progress=False, on_nan="skip")
    assert (result.last_step, result.num_skipped) == (8, 3)


def test_a_stream_over_several_shapes_has_the_outputs_of_steps():
    losses, values = one_by_one(make_job(), ORDER)
    model, job = Net(), make_job()
    outputs = [metrics["loss"] for metrics in job.stream(model, source())]
    assert outputs == losses
    assert_state(model, values)

    @af.job(train=False)
    def count(model, batch):
        return {"rows": (batch.x * 0 + 1).sum() / 8}

    rows = [metrics["rows"] for metrics in count.stream(Net(), source(), steps=5)]
    assert rows == list(ORDER[:5])


def test_leaving_a_stream_ends_its_threads():
    model, before = Net(), num_open()
    for number, _ in enumerate(make_job().stream(model, source(ORDER * 3))):
        if number == 3:
            break
    gc.collect()
    assert num_open() == before


@af.job(train=False)
def evaluate(model, batch):
    return {"loss": af.cross_entropy(model.b(af.gelu(model.a(batch.x))), batch.y), "x": batch.x}


def test_an_evaluation_between_steps_has_the_means_over_its_batches_of_several_shapes():
    model, told = Net(), []
    order = (4, 3, 6)
    watched = af.Evaluation(
        evaluate, source(order), every=3, batches=3, on_result=lambda *pair: told.append(pair)
    )
    result = make_job().fit(model, source(), steps=8, progress=False, evaluation=watched)
    assert [step for step, _ in told] == [3, 6]
    assert list(result.evaluations) == told
    for step, means in told:
        _, values = one_by_one(make_job(), ORDER[:step])
        then = Net()
        then.load({name: values[name] for name in then.state()})
        losses = [evaluate.step(then, batch(r, n))["loss"] for n, r in enumerate(order)]
        evaluate.close(then)
        assert means == {"loss": pytest.approx(np.mean(losses), rel=1e-12)}


def test_an_evaluation_that_lacks_batches_or_wants_averages_is_refused():
    short = af.Evaluation(evaluate, source((4, 3)), every=1, batches=3)
    with raises(af.DataError):
        make_job().fit(Net(), source(), steps=2, progress=False, evaluation=short)
    averages = af.Evaluation(evaluate, source(), every=1, batches=1, ema=True)
    with raises(af.CompileError):
        make_job(ema=0.9).fit(Net(), source(), steps=2, progress=False, evaluation=averages)


@pytest.fixture
def allocated(monkeypatch):
    """The sizes of the blocks that the host allocates from now on."""
    sizes, allocate = [], HostDevice.allocate

    def counted(size_bytes, *request):
        sizes.append(size_bytes)
        return allocate(size_bytes, *request)

    monkeypatch.setattr(HostDevice, "allocate", staticmethod(counted))
    return sizes


@pytest.mark.host("counts what the host allocates")
def test_all_plans_take_turns_on_one_memory_as_large_as_the_largest_needs(capsys, allocated):
    job = make_job(memory_budget="1MiB")
    sizes = {rows: job.compile(Net(), spec(rows)).arenas[0].size_bytes for rows in ROWS}

    job.fit(Net(), source(), steps=len(ORDER), verbose=True)
    assert allocated == [max(sizes.values())]
    assert allocated[0] <= 1 << 20
    lines = capsys.readouterr().out.splitlines()
    for rows, size in sizes.items():
        batches = f"batches of x: float32[{rows}, 8], y: int32[{rows}]"
        assert f"  arenas for {batches}: {size / 1024:.1f} KiB" in lines
    assert f"  3 plans take turns on {allocated[0] / 1024:.1f} KiB" in lines


@pytest.mark.host("counts what the host allocates")
def test_a_larger_shape_moves_all_plans_to_a_larger_memory_once(allocated):
    job, model = make_job(), Net()

    order = (3, 4, 6, 3, 4, 6, 3)
    losses, values = one_by_one(make_job(), order)
    sizes = {rows: job.compile(Net(), spec(rows)).arenas[0].size_bytes for rows in ROWS}
    # A kernel's workspace may make the plan of fewer rows as large as that of more.
    largest = accumulate((sizes[rows] for rows in order), max)
    grown = sorted(set(largest))
    allocated.clear()
    assert stepped(job, model, order) == losses
    assert_state(model, values)
    job.close(model)
    assert allocated == grown
    assert len(grown) > 1


def test_each_shape_of_a_source_is_said_once(caplog):
    job = make_job()
    for _ in range(2):
        job.fit(Net(), source(), steps=2, progress=False)
    model = Net()
    job.step(model, batch(6))
    job.close(model)
    said = [text for text in caplog.messages if "recompiled because" in text]
    assert len(said) == len(ROWS) - 1


def interrupt_at(event, function=LiveVariables.take_turn):
    """Return what interrupts this thread at the call of a function, or at its return."""

    def trace(frame, what, argument):
        if frame.f_code is function.__code__:
            if what == event:
                raise KeyboardInterrupt
            return trace
        return None

    return trace


@pytest.mark.parametrize("event", ["call", "return"])
def test_an_interrupt_of_a_switch_leaves_either_plan_to_go_on(event):
    job, model, num_interrupts = make_job(), Net(), 0
    losses, values = one_by_one(make_job(), ORDER)
    for number, rows in enumerate(ORDER):
        one = batch(rows, number)
        sys.settrace(interrupt_at(event))
        try:
            loss = job.step(model, one)["loss"]
        except KeyboardInterrupt:
            num_interrupts += 1
            assert model.state()["rows"] == sum(ORDER[:number])
            model.load(model.state())  # written while the turn is on its way
            loss = job.step(model, one)["loss"]
        finally:
            sys.settrace(None)
        assert loss == losses[number]
    assert num_interrupts >= 3
    assert_state(model, values)
    job.close(model)


class Scaled(nn.Module):
    """A layer of what is multiplied by a constant, which is another one for each shape."""

    def __init__(self):
        self.a = nn.Linear(8, 5)

    def __call__(self, x):
        rows = x.shape[0]
        return self.a(x * (np.arange(rows * 8, dtype=np.float32).reshape(rows, 8) % 7 - 3))


GROWS, FITS = (3, 6, 3, 6, 3), (6, 3, 6, 3, 6)


@pytest.mark.parametrize(
    ("order", "function"),
    [
        (GROWS, OpenPlans._beside),
        (GROWS, Stepping.__init__),
        (GROWS, VariableMemory.refill),
        (FITS, OpenPlans._beside),
        (FITS, Stepping.__init__),
    ],
)
def test_an_interrupt_while_a_plan_is_loaded_leaves_a_training_that_goes_on(order, function):
    def train(interrupted):
        job, model, states = make_job(), Scaled(), []
        for number, rows in enumerate(order):
            if interrupted == number:
                sys.settrace(interrupt_at("return", function))
                try:
                    with pytest.raises(KeyboardInterrupt):
                        job.step(model, batch(rows, number))
                finally:
                    sys.settrace(None)
            loss = job.step(model, batch(rows, number))["loss"]
            states.append((loss, model.state()["a.weight"].tobytes()))
        job.close(model)
        return states

    assert train(interrupted=1) == train(interrupted=None)


def test_a_new_shape_is_said_of_jobs_whose_outputs_have_weights_too(caplog):
    @af.job(train=False)
    def loss(model, batch):
        return af.cross_entropy(model(batch.x), batch.y, reduction="tokens")

    model = Plain()
    for rows in (4, 6):
        loss.step(model, batch(rows))
    loss.close(model)
    assert sum("recompiled because" in text for text in caplog.messages) == 1


def test_an_evaluation_is_compiled_before_the_first_step_and_closed_after_all():
    @af.job(train=False)
    def wrong(model, batch):
        return {"logits": model(batch.x)}

    steps, held = [], threading.active_count()
    for job, error in ((wrong, af.CompileError), (evaluate, af.DataError)):
        watched = af.Evaluation(job, source((4, 3)), every=1, batches=3)
        with pytest.raises(error, match=r"test_shapes\.py:"):
            make_job().fit(
                Net(), source(), steps=2, progress=False, evaluation=watched,
                on_step=lambda step, metrics, job=job: steps.append(job.name),
            )  # fmt: skip
    assert steps == ["evaluate"], "it lacks batches, which only its first use can tell"
    assert threading.active_count() == held
