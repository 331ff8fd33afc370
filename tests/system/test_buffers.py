"""State that is no parameter: what a job assigns to its buffers, against a walk in numpy."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

STEPS, ROWS, WIDTH = 20, 4, 3


class Centred(nn.Module):
    """Keeps a running mean and a count, reads both, before and after they are assigned."""

    def __init__(self):
        self.lin = nn.Linear(WIDTH, 2)
        self.mean = nn.Buffer((WIDTH,))
        self.count = nn.Buffer((), dtype="int64")
        self.shift = nn.Buffer(np.arange(WIDTH, dtype=np.float32))

    def __call__(self, x):
        before = self.mean.sum()
        self.mean.assign(self.mean * 0.5 + x.mean(0) * 0.5)
        self.count.assign(self.count + 1)
        y = self.lin(af.relu(x - self.mean + self.shift))
        return y, {"before": before, "after": self.mean.sum(), "count": self.count.to("float32")}


def job(**options):
    @af.job(optimizer=af.optim.SGD(0.05, momentum=0.9), **options)
    def train(model, batch):
        y, seen = model(batch.x)
        return {"loss": af.mse_loss(y, batch.y), **seen}

    return train


@af.job(train=False)
def score(model, batch):
    y, seen = model(batch.x)
    return {"loss": af.mse_loss(y, batch.y), **seen}


def batches(count, broken=()):
    rng = np.random.default_rng(7)
    rows = [
        {
            "x": rng.standard_normal((ROWS, WIDTH)).astype(np.float32) + 1,
            "y": rng.standard_normal((ROWS, 2)).astype(np.float32),
        }
        for _ in range(count)
    ]
    for place in broken:
        rows[place]["x"][0, 0] = np.nan
    return rows


def source_of(rows):
    whole = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return af.data.ArraySource(whole, batch=ROWS, shuffle=False)


def walk(rows, every=1):
    """Return the means before and after each batch, and the counts; a broken step keeps nothing."""
    mean, count = np.zeros(WIDTH), 0
    seen = []
    for first in range(0, len(rows), every):
        start = mean, count
        for row in rows[first : first + every]:
            before, mean, count = mean, mean * 0.5 + row["x"].mean(0) * 0.5, count + 1
            seen.append((before.sum(), mean.sum(), count))
        if not np.isfinite(mean).all():
            mean, count = start
    return mean, count, np.array(seen).reshape(-1, every, 3).mean(1)


def fit(train, model, rows, **options):
    seen = []
    every = train.options.accumulate
    options = {"steps": len(rows) // every, "progress": False, **options}
    result = train.fit(
        model, source_of(rows),
        on_step=lambda step, m: seen.append([m["before"], m["after"], m["count"]]), **options,
    )  # fmt: skip
    return result, np.array(seen)


OPTIONS = [
    {}, {"accumulate": 4}, {"streams": 2}, {"recompute": "blocks"}, {"metrics_every": 5},
    {"accumulate": 4, "recompute": "blocks"}, {"device": "sim"}, {"device": "sim", "accumulate": 2},
    {"devices": ["host", "sim:1"]}, {"offload": "optimizer"}, {"precision": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_batch_sees_what_the_one_before_assigned(options):
    model, rows = Centred(), batches(STEPS)
    _, seen = fit(job(**options), model, rows)
    mean, count, expected = walk(rows, options.get("accumulate", 1))
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.mean.data, mean, rtol=1e-5)
    assert model.count.data == count == STEPS


@pytest.mark.parametrize("every", [1, 4])
def test_single_steps_a_stream_and_a_fit_keep_the_same_bits(every):
    rows = batches(STEPS)
    models = [Centred(), Centred(), Centred()]
    train = job(accumulate=every)
    fit(train, models[0], rows)
    for first in range(0, STEPS, every):
        step = rows[first : first + every]
        train.step(models[1], step if every > 1 else step[0])
    for _ in train.stream(models[2], source_of(rows), steps=STEPS // every):
        pass
    states = [model.state() for model in models]
    for name, array in states[0].items():
        assert [other[name].tobytes() for other in states[1:]] == [array.tobytes()] * 2, name


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("options", [{}, {"streams": 2}, {"device": "sim"}], ids=str)
def test_a_step_that_is_skipped_keeps_nothing_of_its_batches(every, options):
    model, rows = Centred(), batches(STEPS, broken=(5, 10))
    result, _ = fit(job(accumulate=every, **options), model, rows, on_nan="skip")
    mean, count, _ = walk(rows, every)
    assert result.num_skipped == 2
    np.testing.assert_allclose(model.mean.data, mean, rtol=1e-5)
    assert model.count.data == count == STEPS - 2 * every


def test_a_step_that_overflows_in_float16_keeps_nothing():
    model, rows = Centred(), batches(STEPS)
    train = job(precision="fp16", loss_scale=af.LossScale(init_scale=2.0**30))
    result, _ = fit(train, model, rows)
    assert 0 < result.num_skipped < STEPS
    assert model.count.data == STEPS - result.num_skipped


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_bit_by_bit(tmp_path, every):
    rows, train = batches(STEPS), job(accumulate=every)
    whole, half = Centred(), Centred()
    fit(train, whole, rows)
    fit(train, half, rows, steps=STEPS // every // 2, checkpoint=str(tmp_path), every=2)
    again = Centred()
    fit(train, again, rows, checkpoint=str(tmp_path), every=2)
    for name, array in whole.state().items():
        assert again.state()[name].tobytes() == array.tobytes(), name
    assert half.count.data == STEPS // 2


@pytest.mark.parametrize("every", [1, 4])
def test_an_evaluation_between_steps_reads_the_newest_and_writes_nothing(every):
    rows, found = batches(STEPS), []
    held_out = batches(2)
    valid = af.Evaluation(
        score, source_of(held_out), every=1, batches=2,
        on_result=lambda step, means: found.append((step, means["before"], means["count"])),
    )  # fmt: skip
    model, plain = Centred(), Centred()
    fit(job(accumulate=every), model, rows, evaluation=valid)
    fit(job(accumulate=every), plain, rows)
    for step, before, count in found:
        mean, done, _ = walk(rows[: step * every])
        assert before == pytest.approx(mean.sum(), rel=1e-5)
        assert count == done + 1  # assigned in that job, and seen only there
    assert len(found) == STEPS // every
    for name, array in plain.state().items():
        assert model.state()[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("options", [{}, {"device": "sim"}, {"streams": 2}], ids=str)
@pytest.mark.parametrize("way", ["step", "stream", "fit"])
def test_a_job_that_does_not_train_keeps_what_it_assigns_too(way, options):
    model, rows = Centred(), batches(STEPS)
    job_of = af.job(train=False, **options)

    @job_of
    def look(model, batch):
        return model(batch.x)[1]

    if way == "step":
        seen = [look.step(model, row) for row in rows]
    elif way == "stream":
        seen = [*look.stream(model, source_of(rows), steps=STEPS)]
    else:
        seen = []
        look.fit(
            model, source_of(rows), steps=STEPS, progress=False,
            on_step=lambda step, outputs: seen.append(outputs),
        )  # fmt: skip
    mean, count, expected = walk(rows)
    found = [[m["before"], m["after"], m["count"]] for m in seen]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.mean.data, mean, rtol=1e-5)
    assert model.count.data == count == STEPS


def test_jobs_that_train_and_that_do_not_take_turns_at_one_buffer():
    model, (row,) = Centred(), batches(1)
    train = job()
    for done in range(0, 8, 4):
        assert score.step(model, row)["count"] == done + 1
        assert train.step(model, row)["count"] == done + 2
        model.count.data = np.array(done + 3)
        weights = model.lin.weight.data
        assert score.step(model, row)["count"] == done + 4
        np.testing.assert_array_equal(model.lin.weight.data, weights)
    loss = score.step(model, row)["loss"]
    model.lin.weight.data = model.lin.weight.data + 1.0  # between steps of a plan that stays open
    assert score.step(model, row)["loss"] != loss


def test_a_batch_of_another_length_goes_on_with_what_was_assigned():
    class Cache(nn.Module):
        def __init__(self):
            self.keys, self.length = nn.Buffer((8, 2)), nn.Buffer((), dtype="int64")

        def __call__(self, x):
            at = af.arange(8).reshape(8, 1) - self.length
            rows = x.gather(0, at.clamp(0, len(x) - 1).broadcast_to((8, 2)))
            self.keys.assign(af.where((at >= 0) & (at < len(x)), rows, self.keys))
            self.length.assign(self.length + len(x))
            return self.keys.sum()

    @af.job(train=False)
    def read(model, batch):
        return {"sum": model(batch.x)}

    model, rows = Cache(), np.arange(16, dtype=np.float32).reshape(8, 2)
    for first, last in ((0, 3), (3, 4), (4, 5), (5, 8)):
        assert read.step(model, {"x": rows[first:last]})["sum"] == rows[:last].sum()
    np.testing.assert_array_equal(model.keys.data, rows)


def test_two_calls_that_assign_one_buffer_at_once_are_refused_with_both_lines():
    model, rows = Centred(), batches(4)
    outputs = score.stream(model, source_of(rows), steps=3)
    next(outputs)
    with raises(af.CompileError):
        af.job(score.function, train=False).step(model, rows[0])
    with raises(af.CompileError):
        job().step(model, rows[0])
    outputs.close()
    assert job().step(model, rows[0])["loss"] > 0.0


def test_an_evaluation_of_a_training_says_that_it_keeps_nothing(caplog):
    valid = af.Evaluation(score, source_of(batches(1)), every=2, batches=1)
    fit(job(), Centred(), batches(2), evaluation=valid)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "test_buffers.py:" in line and "'count'" in line]


def test_what_is_written_outside_of_jobs_counts_from_the_next_step():
    model, (row,) = Centred(), batches(1)
    train = job()
    train.step(model, row)
    model.count.data = np.array(41)
    assert train.step(model, row)["count"] == 42.0
    assert model.count.data == 42


DTYPES = [d.value for d in af.DType if d is not af.DType.BFLOAT16]


@pytest.mark.parametrize("every", [1, 2])
def test_a_buffer_may_be_of_any_dtype(every):
    class Model(nn.Module):
        def __init__(self):
            self.lin = nn.Linear(WIDTH, 2)
            for dtype in DTYPES:
                setattr(self, dtype, nn.Buffer((2, 3), dtype=dtype))

        def __call__(self, batch):
            for dtype in DTYPES:
                getattr(self, dtype).assign(batch[dtype])
            return self.lin(batch.x)

    @af.job(optimizer=af.optim.SGD(0.1), accumulate=every)
    def train(model, batch):
        return af.mse_loss(model(batch), batch.y)

    rng = np.random.default_rng(0)
    model = Model()
    for row in batches(3):
        given = {d: rng.integers(0, 2, (2, 3)).astype(d) for d in DTYPES}
        train.step(model, [row | given] * every if every > 1 else row | given)
        for dtype in DTYPES:
            found = model.state()[dtype]
            assert (found.dtype, found.tobytes()) == (np.dtype(dtype), given[dtype].tobytes())


def test_a_module_names_saves_and_shows_its_buffers():
    model = Centred()
    assert [name for name, _ in model.named_buffers()] == ["mean", "count", "shift"]
    assert [name for name, _ in model.named_parameters()] == ["lin.weight", "lin.bias"]
    assert model.num_parameters() == 2 * WIDTH + 2
    assert "count int64[] buffer" in repr(model)
    assert repr(model.mean) == "Buffer(float32[3])"
    np.testing.assert_array_equal(model.shift.data, np.arange(WIDTH))
    fit(job(), model, batches(2))
    other = Centred()
    other.load(model.state())
    assert list(other.state()) == ["lin.weight", "lin.bias", "mean", "count", "shift"]
    assert other.count.data == 2


def test_a_buffer_under_two_names_is_one():
    class Shared(Centred):
        def __init__(self):
            super().__init__()
            self.same = self.count

    model = Shared()
    fit(job(), model, batches(3))
    assert [name for name, _ in model.named_buffers()] == ["mean", "count", "shift"]
    assert "same int64[] buffer (shared)" in repr(model)
    assert model.same.data == 3


def test_of_several_assignments_in_a_step_the_last_is_kept():
    class Twice(nn.Module):
        def __init__(self):
            self.inner = Centred()

        def __call__(self, x):
            self.inner(x)
            return self.inner(x)

    model = Twice()
    _, seen = fit(job(), model, batches(3))
    np.testing.assert_array_equal(seen[:, 2], [2, 4, 6])
    assert model.inner.count.data == 6


def test_gradients_flow_through_what_is_assigned_within_a_step():
    class Scaled(nn.Module):
        def __init__(self):
            self.lin = nn.Linear(WIDTH, 1)
            self.last = nn.Buffer((ROWS, 1))

        def __call__(self, x):
            self.last.assign(self.lin(x))
            return (self.last * self.last).sum()

    @af.job(optimizer=af.optim.SGD(0.5))
    def train(model, batch):
        return model(batch.x)

    model, (row,) = Scaled(), batches(1)
    model.lin.weight.data = np.ones((1, WIDTH), np.float32)
    model.lin.bias.data = np.zeros(1, np.float32)
    train.step(model, row)
    y = row["x"].sum(1, keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(model.last.data, y, rtol=1e-6)
    np.testing.assert_allclose(model.lin.weight.data, 1 - (y * row["x"]).sum(0)[None], rtol=1e-5)


def test_a_scan_reads_what_was_assigned_before_and_assigns_nothing():
    class Model(nn.Module):
        def __init__(self):
            self.lin, self.last = nn.Linear(WIDTH, WIDTH), nn.Buffer((WIDTH,))

    @af.job(optimizer=af.optim.SGD(0.0))
    def train(model, batch):
        model.last.assign(model.last + 1.0)
        end, _ = af.scan(lambda c, x: (c + model.last, x), model.lin(batch.x[0]) * 0.0, batch.x)
        return {"loss": end.sum()}

    @af.job(optimizer=af.optim.SGD(0.0))
    def within(model, batch):
        def add(c, x):
            model.last.assign(x)
            return c + x, x

        return af.scan(add, model.lin(batch.x[0]), batch.x)[0].sum()

    model, (row,) = Model(), batches(1)
    assert [train.step(model, row)["loss"] for _ in range(2)] == [ROWS * WIDTH, 2 * ROWS * WIDTH]
    with raises(af.CompileError):
        within.step(model, row)


@pytest.mark.parametrize(
    "assign",
    [
        lambda m, x: m.mean.assign(x.sum()),
        lambda m, x: m.mean.assign(x[0].to("float64")),
        lambda m, x: m.count.assign(0.5),
        lambda m, x: m.count.assign("no"),
        lambda m, x: m.lin.weight.assign(x),
        lambda m, x: nn.Buffer((3,)).assign(x[0]),
    ],
)
def test_what_cannot_be_assigned_is_refused_with_its_line(assign):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        assign(model, batch.x)
        return model(batch.x)[0].sum()

    with raises(af.CompileError):
        train.step(Centred(), batches(1)[0])


def test_a_buffer_is_assigned_inside_of_jobs_and_written_outside():
    with raises(af.CompileError):
        Centred().mean.assign(0.0)
    with raises(af.CompileError):
        Centred().count.data = np.zeros((), np.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Buffer("x"),
        lambda: nn.Buffer((2.5,)),
        lambda: nn.Buffer((2,), dtype="bfloat16"),
        lambda: nn.Buffer((2,), dtype="text"),
        lambda: nn.Buffer((-1,)),
        lambda: nn.Buffer(np.zeros(2), (("kind", "ones"),)),
        lambda: nn.Buffer((2,), (("kind", "glorot"),)),
    ],
)
def test_a_buffer_that_cannot_be_is_refused(make):
    with raises(af.CompileError):
        make()


def test_an_initialiser_of_a_number_begins_there_and_a_random_one_by_the_seed():
    assert nn.Buffer((2,), (("kind", "constant"), ("value", -1.5))).data.tolist() == [-1.5, -1.5]
    assert nn.Buffer(3, (("kind", "ones"),), "int32").data.tolist() == [1, 1, 1]
    assert nn.Buffer((2,), (("kind", "normal"), ("std", 1.0))).data is None


def test_no_buffer_takes_a_name_of_the_engine():
    class Model(nn.Module):
        def __init__(self):
            self.lin, self.step = nn.Linear(WIDTH, 2), nn.Buffer(())

        def __call__(self, x):
            return self.lin(x), {}

    with raises(af.CompileError):
        job().step(Model(), batches(1)[0])
