"""A step of several batches: one update with the mean of their gradients."""

import os
import signal

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same, rows_of_fit

import actorflow as af
from actorflow import nn
from actorflow.tensor.initial_values import initial_values

OPTIMIZERS = {
    "momentum": af.optim.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "adamw": af.optim.AdamW(1e-2, betas=(0.9, 0.95), weight_decay=0.1),
}


def batches_of(source, count):
    return [{k: v.copy() for k, v in next(source).items()} for _ in range(count)]


def joined(batches):
    return {k: np.concatenate([batch[k] for batch in batches]) for k in batches[0]}


def loss_and_gradients(p, batch):
    """Return the mean cross-entropy of the two-layer network and its gradients, in float64."""
    x, y = batch["x"].astype(np.float64), batch["y"]
    h = x @ p["up.weight"].T + p["up.bias"]
    z = np.maximum(h, 0) @ p["down.weight"].T + p["down.bias"]
    z = z - z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    rows = np.arange(len(y))
    dz = (np.exp(log_p) - np.eye(z.shape[1])[y]) / len(y)
    dh = dz @ p["down.weight"] * (h > 0)
    gradients = {
        "down.weight": dz.T @ np.maximum(h, 0), "down.bias": dz.sum(0),
        "up.weight": dh.T @ x, "up.bias": dh.sum(0),
    }  # fmt: skip
    return -log_p[rows, y].mean(), gradients


def momentum_step(p, g, state, t):
    for name in p:
        d = g[name] + 0.01 * p[name]
        state[name] = buffer = 0.9 * state.get(name, 0.0) + d
        p[name] = p[name] - 0.1 * buffer


def adamw_step(p, g, state, t):
    for name in p:
        m, v = state.get(name, (0.0, 0.0))
        m, v = 0.9 * m + 0.1 * g[name], 0.95 * v + 0.05 * g[name] ** 2
        state[name] = m, v
        direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        p[name] = p[name] - 1e-2 * 0.1 * p[name] - 1e-2 * direction


UPDATES = {"momentum": momentum_step, "adamw": adamw_step}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_k_batches_are_one_batch_of_all_their_rows(mlp, classification, classify, name, k):
    steps = 4
    batches = batches_of(classification(batch=8), k * steps)
    groups = [batches[i : i + k] for i in range(0, len(batches), k)]
    many, one = (classify(optimizer=OPTIMIZERS[name], accumulate=n) for n in (k, 1))
    first, second = mlp(), mlp()
    spec = classification(batch=8).spec()
    values = initial_values(one.compile(first, spec), {}, 0)
    p = {n: values[n].astype(np.float64) for n, _ in first.named_parameters()}
    state = {}
    for t, group in enumerate(groups, 1):
        expected, gradients = loss_and_gradients(p, joined(group))
        UPDATES[name](p, gradients, state, t)
        got = many.step(first, group if k > 1 else group[0])["loss"]
        whole = one.step(second, joined(group))["loss"]
        assert got == pytest.approx(expected, rel=1e-5)
        assert got == pytest.approx(whole, rel=1e-5)
    for parameter, array in p.items():
        for model in (first, second):
            np.testing.assert_allclose(model.state()[parameter], array, rtol=2e-4, atol=2e-6)
    many.close(first)
    one.close(second)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulation_agrees_with_torch(mlp, classification, classify, name):
    torch = pytest.importorskip("torch", reason="torch is an optional oracle")
    k, batches = 3, batches_of(classification(batch=8), 12)
    train, model = classify(optimizer=OPTIMIZERS[name], accumulate=k), mlp()
    values = initial_values(train.compile(model, classification(batch=8)), {}, 0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)
    net = torch.nn.Sequential(*layers).double()
    names = ("up.weight", "up.bias", "down.weight", "down.bias")
    with torch.no_grad():
        for parameter, path in zip(net.parameters(), names, strict=True):
            parameter.copy_(torch.tensor(values[path]))
    optimizer = {
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    }[name](net.parameters())
    for begin in range(0, len(batches), k):
        for batch in batches[begin : begin + k]:
            out = net(torch.tensor(batch["x"], dtype=torch.float64))
            target = torch.tensor(batch["y"], dtype=torch.long)
            (torch.nn.functional.cross_entropy(out, target) / k).backward()
        optimizer.step()
        optimizer.zero_grad()
        train.step(model, batches[begin : begin + k])
    train.close(model)
    for parameter, path in zip(net.parameters(), names, strict=True):
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(model.state()[path], expected, rtol=2e-4, atol=2e-6)


class Counted:
    """Batches of ones with weights 2^-i, so that the sum over a mask tells every bit of it."""

    def __init__(self, batches=10_000):
        self._left = batches
        self._weights = (0.5 ** np.arange(1, 17)).astype(np.float32)

    def spec(self):
        return {"w": af.TensorType(af.DType.FLOAT32, (16,))}

    def state(self):
        return {"left": self._left}

    def restore(self, state):
        self._left = state["left"]

    def fingerprint(self):
        return "counted"

    def __next__(self):
        if not self._left:
            raise StopIteration
        self._left -= 1
        return {"w": self._weights}


class Scale(nn.Module):
    def __init__(self):
        self.scale = nn.Parameter((16,), (("kind", "zeros"),))
        self.drop = nn.Dropout(0.5)

    def __call__(self, w):
        return (self.drop(w + self.scale) * 0.5).sum()


def masks(**options):
    @af.job(optimizer=af.optim.SGD(0.0), seed=3, **options)
    def train(model, batch):
        return model(batch.w)

    return train


def test_every_batch_of_a_step_draws_a_mask_of_its_own():
    by_batch, _ = rows_of_fit(masks(), Scale(), Counted(), 12)
    drawn = [loss for _, loss in by_batch]
    assert len(set(drawn)) == len(drawn)
    by_step, _ = rows_of_fit(masks(accumulate=3), Scale(), Counted(), 4)
    expected = [sum(drawn[i : i + 3]) / 3 for i in range(0, 12, 3)]
    assert [loss for _, loss in by_step] == pytest.approx(expected, rel=1e-12)


class Killed(BaseException):
    """Ends a run from inside of it, as an interrupt would."""


@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"streams": 2}], ids=str)
def test_a_run_that_is_killed_at_any_step_resumes_bit_by_bit(
    mlp, classification, classify, tmp_path, cut, options, many_chains
):
    def job():
        return classify(accumulate=3, **options)

    whole, expected = rows_of_fit(job(), mlp(dropout=0.4), classification(), 7)

    def kill(step, metrics):
        if step == cut:
            raise Killed

    run = tmp_path / "run"
    with pytest.raises(Killed):
        job().fit(
            mlp(dropout=0.4), classification(), steps=7, checkpoint=run, every=1, progress=False,
            on_step=kill,
        )  # fmt: skip
    rows, result = rows_of_fit(
        job(), mlp(dropout=0.4), classification(), 7, checkpoint=run, every=1
    )
    assert rows == whole[result.first_step :]
    assert_same(result.variables, expected.variables)


def test_a_run_in_parts_equals_one_in_whole_and_saves_no_scratch(
    mlp, classification, classify, tmp_path
):
    whole, expected = rows_of_fit(classify(accumulate=2), mlp(dropout=0.4), classification(), 9)
    rows = []
    for steps in (1, 4, 9):
        part, result = rows_of_fit(
            classify(accumulate=2), mlp(dropout=0.4), classification(), steps,
            checkpoint=tmp_path / "run", every=1,
        )  # fmt: skip
        rows += part
    assert rows == whole
    assert result.variables.keys() == expected.variables.keys()
    assert not [n for n in result.variables if n == "batches" or n.startswith("gradient/")]
    assert_same(result.variables, expected.variables)


def rows_with(count):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(4 * count, 8)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 5, 4 * count).astype(np.int32)}


@pytest.mark.parametrize(("batches", "whole_steps"), [(7, 2), (8, 2), (9, 3), (2, 0)])
def test_a_step_that_the_end_of_the_data_cuts_short_is_dropped(
    mlp, classify, tmp_path, capsys, batches, whole_steps
):
    def source(count):
        arrays = {n: a[: 4 * count] for n, a in rows_with(9).items()}
        return af.data.ArraySource(arrays, batch=4, epochs=1, shuffle=False)

    run = tmp_path / "run"
    result = classify(accumulate=3).fit(mlp(), source(batches), steps=10, checkpoint=run, every=1)
    assert result.last_step == whole_steps
    assert f"the data ended after step {whole_steps} of 10" in capsys.readouterr().out
    _, expected = rows_of_fit(classify(accumulate=3), mlp(), source(9), whole_steps)
    assert_same(result.variables, expected.variables)


def test_a_run_resumes_behind_the_last_whole_step_of_data_that_ended(mlp, classify, tmp_path):
    class Growing(Counted):
        """Has as many batches as are there by now."""

        def __init__(self, batches):
            super().__init__(0)
            self._position, self._batches = 0, batches

        def state(self):
            return {"position": self._position}

        def restore(self, state):
            self._position = state["position"]

        def __next__(self):
            if self._position == self._batches:
                raise StopIteration
            self._position += 1
            return {"w": self._weights}

    whole, _ = rows_of_fit(masks(accumulate=3), Scale(), Growing(12), 4)
    first, _ = rows_of_fit(
        masks(accumulate=3), Scale(), Growing(8), 4, checkpoint=tmp_path, every=1
    )
    second, result = rows_of_fit(
        masks(accumulate=3), Scale(), Growing(12), 4, checkpoint=tmp_path, every=1
    )
    assert (len(first), result.first_step) == (2, 2)
    assert first + second == whole


def test_a_signal_in_the_middle_of_a_step_finishes_the_step(tmp_path, new_threads):
    class Signalling(Counted):
        """Sends the signal while the second batch of the third step is fetched."""

        def __next__(self):
            if self._left == 10_000 - 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__next__()

    with pytest.raises(af.Stopped) as caught:
        masks(accumulate=3).fit(
            Scale(), Signalling(), steps=900, checkpoint=tmp_path, every=1, progress=False
        )
    stopped = caught.value.step
    assert 3 <= stopped < 900
    assert not new_threads()
    rows, result = rows_of_fit(
        masks(accumulate=3), Scale(), Counted(), stopped + 2, checkpoint=tmp_path, every=1
    )
    whole, _ = rows_of_fit(masks(accumulate=3), Scale(), Counted(), stopped + 2)
    assert result.first_step == stopped
    assert rows == whole[stopped:]


@pytest.mark.parametrize("given", [[], 2, 4, "dict"])
def test_a_step_wants_as_many_batches_as_it_accumulates(mlp, classification, classify, given):
    data = classification()
    batch = next(data) if given == "dict" else batches_of(data, given or 0)
    with raises(af.CompileError):
        classify(accumulate=3).step(mlp(), batch)


@pytest.mark.parametrize("count", [0, -2, True, 1.5, "2", None])
@pytest.mark.parametrize("name", ["accumulate", "metrics_every", "streams"])
def test_counts_that_are_no_positive_integers_are_an_error_with_the_users_line(
    classify, name, count
):
    with raises(af.CompileError):
        classify(**{name: count})


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 1025},
        {"accumulate": 64, "metrics_every": 32},
        {"streams": 65},
        {"max_plans": 0},
        {"seed": -1},
        {"seed": "a"},
        {"seed": 1 << 63},
        {"optimizer": 3},
    ],
)
def test_options_out_of_range_are_an_error_with_the_users_line(classify, options):
    with raises(af.CompileError):
        classify(**options)


def test_a_job_that_does_not_train_has_nothing_to_accumulate():
    with raises(af.CompileError):

        @af.job(train=False, accumulate=2)
        def predict(model, batch):
            return model(batch.x)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_job_whose_parameters_are_all_frozen_is_refused_with_its_line(
    mlp, classification, classify, accumulate
):
    model = mlp()
    for _, parameter in model.named_parameters():
        parameter.freeze()
    with raises(af.CompileError):
        classify(accumulate=accumulate).compile(model, classification())


@pytest.mark.one_device("looks for the one actor of updates")
def test_updates_and_their_learning_rate_run_once_per_step(mlp, classification):
    schedule = af.optim.linear(0.1, steps=10)

    @af.job(optimizer=af.optim.SGD(schedule), accumulate=3)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    plan = train.compile(mlp(), classification())
    update = next(a for a in plan.actors if a.name == "update")
    gradient = next(a for a in plan.actors if a.name == "gradient")
    assert {launch.op for launch in update.launches} >= {"sgd_update", "increment"}
    assert not {launch.op for launch in gradient.launches} & {"sgd_update"}
    assert [port.rate for port in update.inputs] == [3]


def test_a_parameter_cannot_have_the_name_of_the_counter_of_batches():
    class Odd(Scale):
        def __init__(self):
            super().__init__()
            self.batches, self.scale = self.scale, None

        def __call__(self, w):
            return (w + self.batches).sum()

    with raises(af.CompileError):
        masks(accumulate=2).compile(Odd(), Counted())


@pytest.mark.parametrize(
    ("batches", "said"),
    [(8, None), (9, "its last batch was not used"), (11, "its last 3 batches were not used")],
)
@pytest.mark.parametrize("way", ["fit", "stream", "checkpoint"])
def test_batches_that_make_no_step_are_counted(tmp_path, caplog, batches, said, way):
    job = masks(accumulate=4)
    if way == "stream":
        assert len(list(job.stream(Scale(), Counted(batches)))) == 2
    else:
        kept = {"checkpoint": tmp_path / "run", "every": 1} if way == "checkpoint" else {}
        assert job.fit(Scale(), Counted(batches), steps=5, progress=False, **kept).last_step == 2
    if said is None:
        assert "batch" not in caplog.text
    else:
        message = f"the data ended in the middle of a step: {said}, for a step accumulates 4"
        assert message in caplog.text


def test_a_source_that_raises_in_the_middle_of_a_step_says_what_was_not_used_too(caplog):
    class Failing(Counted):
        def __next__(self):
            if self._left == 10_000 - 6:
                raise OSError("gone")
            return super().__next__()

    with pytest.raises(OSError, match="gone"):
        masks(accumulate=4).fit(Scale(), Failing(), steps=5, progress=False)
    assert "its last 2 batches were not used" in caplog.text
