"""Jobs with precision="fp16": the loss scale beside torch's GradScaler, overflows, losses."""

import math

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT, assert_same, losses_of_fit

import actorflow as af
from actorflow import nn
from compiler.contract.types import DType
from compiler.pipeline.printer import summarise

ROWS, WIDTH, OUT = 2, 8, 3
LIMIT = 65520.0
"""From here on a number becomes infinite in float16."""

OPTIMIZERS = {
    "sgd": af.optim.SGD(1e-3),
    "adamw": af.optim.AdamW(1e-2, weight_decay=0.1),
}


class Scaler:
    """What torch.amp.GradScaler does with its scale, by its documentation."""

    def __init__(self, init=65536.0, growth=2.0, backoff=0.5, interval=2000):
        self.scale, self.growth, self.backoff, self.interval = init, growth, backoff, interval
        self.good = 0

    def update(self, overflowed):
        if overflowed:
            self.scale, self.good = self.scale * self.backoff, 0
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0


def low(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16)


class Oracle:
    """A linear layer under the mean square of its errors, by numpy; one `step` per batches."""

    def __init__(self, weight, optimizer, scaler):
        self.w, self.scaler, self.optimizer = weight.astype(np.float64), scaler, optimizer
        self.m = self.v = np.zeros_like(self.w)
        self.updates = 0

    def step(self, *batches):
        """Return the loss, the scale that it was multiplied by, and whether there was an update."""
        scale, losses, total = self.scaler.scale, [], 0.0
        for batch in batches:
            x = low(batch["x"])
            error = np.float32(x.astype(np.float64) @ low(self.w).T.astype(np.float64)) - batch["t"]
            losses.append(np.mean(error.astype(np.float64) ** 2))
            slope = low(error * np.float32(2 * scale / error.size / len(batches)))
            with np.errstate(invalid="ignore"):
                total = total + np.float64(slope).T @ np.float64(x)
        is_finite = bool(np.isfinite(total).all())
        self.scaler.update(not is_finite)
        if is_finite:
            self._update(total / scale)
        return np.mean(losses), scale, is_finite

    def _update(self, grad):
        self.updates += 1
        o = self.optimizer
        if isinstance(o, af.optim.SGD):
            self.w = self.w - o.lr * grad
            return
        (b1, b2), t = o.betas, self.updates
        self.m, self.v = b1 * self.m + (1 - b1) * grad, b2 * self.v + (1 - b2) * grad**2
        change = self.m / (1 - b1**t) / (np.sqrt(self.v / (1 - b2**t)) + o.eps)
        self.w = self.w * (1 - o.lr * o.weight_decay) - o.lr * change


def make_job(optimizer="sgd", **options):
    """Return a job whose gradients overflow where an error is too large for the scale."""

    @af.job(**{"precision": "fp16", "optimizer": OPTIMIZERS[optimizer], **options})
    def train(model, batch):
        return af.square(model(batch.x) - batch.t).mean()

    return train


def make_model():
    model = nn.Linear(WIDTH, OUT, bias=False)
    model.weight.load(np.random.default_rng(5).normal(0, 0.3, (OUT, WIDTH)).astype(np.float32))
    return model


def make_batches(count, large=(), by=20.0):
    """Return batches; with errors of about `by` in those that are `large`, counted from 1."""
    rng = np.random.default_rng(1)
    found = []
    for step in range(1, count + 1):
        x = rng.normal(0, 0.5, (ROWS, WIDTH)).astype(np.float32)
        t = rng.normal(0, 0.5, (ROWS, OUT)).astype(np.float32)
        found.append({"x": x, "t": t + np.float32(by if step in large else 0)})
    return found


def source_of(batches):
    arrays = {key: np.concatenate([b[key] for b in batches]) for key in ("x", "t")}
    return af.data.ArraySource(arrays, batch=ROWS, shuffle=False)


def fit(job, batches, model=None, **options):
    """Return the result, and loss, scale and count of the skipped of every step."""
    rows, steps = [], options.pop("steps", len(batches) // job.options.accumulate)
    result = job.fit(
        model or make_model(), source_of(batches), steps=steps, progress=False,
        on_step=lambda _, m: rows.append((m["loss"], m["loss_scale"], m["skipped"])), **options,
    )  # fmt: skip
    return result, rows


SCALES = {
    "its own": (None, {}),
    "growing": (
        af.LossScale(init_scale=2.0**14, growth_interval=3), {"init": 2.0**14, "interval": 3}
    ),
    "by other factors": (
        af.LossScale(init_scale=1e5, growth_factor=3, backoff_factor=0.3, growth_interval=2),
        {"init": 1e5, "growth": 3.0, "backoff": 0.3, "interval": 2},
    ),
    "from far above": (af.LossScale(init_scale=2.0**24), {"init": 2.0**24}),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_run_is_that_of_torchs_scaler(scale, optimizer):
    given, settings = SCALES[scale]
    batches = make_batches(16, large=(5, 6, 12))
    oracle = Oracle(make_model().weight.data, OPTIMIZERS[optimizer], Scaler(**settings))
    wanted = [oracle.step(batch) for batch in batches]
    model = make_model()
    result, rows = fit(make_job(optimizer, loss_scale=given), batches, model)
    kept = [is_kept for *_, is_kept in wanted]
    assert 1 < kept.count(False) < 16
    np.testing.assert_allclose([r[0] for r in rows], [w[0] for w in wanted], rtol=1e-4)
    np.testing.assert_allclose([r[1] for r in rows], [w[1] for w in wanted], rtol=1e-6)
    assert [r[2] for r in rows] == [kept[:step].count(False) for step in range(16)]
    assert result.num_skipped == kept.count(False)
    assert float(result.variables["loss_scale"]) == pytest.approx(oracle.scaler.scale)
    assert int(result.variables["loss_scale/good_steps"]) == oracle.scaler.good
    np.testing.assert_allclose(model.weight.data, oracle.w, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_overflows_changes_no_bit_of_the_state(optimizer):
    batches = make_batches(4, large=(4,))
    before, _ = fit(make_job(optimizer), batches[:3])
    after, rows = fit(make_job(optimizer), batches)
    assert rows[-1][1] == 65536.0
    assert after.num_skipped == 1
    counters = {"step": 4, "skipped": 1, "loss_scale": 32768.0, "loss_scale/good_steps": 0}
    for name, array in after.variables.items():
        if name in counters:
            assert array == counters[name], name
        else:
            assert array.tobytes() == before.variables[name].tobytes(), name


def test_steps_one_by_one_show_the_scale_and_leave_the_model_alone_where_they_overflow():
    job, model = make_job("adamw"), make_model()
    for number, batch in enumerate(make_batches(4, large=(2,)), 1):
        before = model.weight.data.copy()
        metrics = job.step(model, batch)
        assert metrics["loss_scale"] == (65536.0 if number < 3 else 32768.0)
        assert np.array_equal(before, model.weight.data) == (number == 2)
    job.close(model)


def test_a_run_resumes_bit_exactly_with_its_scale(tmp_path):
    job = make_job("adamw", loss_scale=af.LossScale(growth_interval=3))
    batches = make_batches(12, large=(3, 4, 8))
    whole, rows = fit(job, batches)
    options = {"checkpoint": tmp_path / "run", "every": 1}
    _, first = fit(job, batches, steps=5, **options)
    second, rest = fit(job, batches, steps=12, **options)
    assert first + rest == rows
    assert len({scale for _, scale, _ in rows}) > 2
    assert_same(whole.variables, second.variables)


def test_a_run_goes_on_in_another_precision_and_back(tmp_path):
    options = {"checkpoint": tmp_path / "run", "every": 1}
    batches = make_batches(9, large=(2,))
    fit(make_job(), batches, steps=3, **options)
    plain = make_job(precision="fp32")
    model = make_model()
    result = plain.fit(model, source_of(batches), steps=6, progress=False, **options)
    assert result.first_step == 3
    assert "loss_scale" not in result.metrics
    result, rows = fit(make_job(), batches, **options)
    assert [scale for _, scale, _ in rows] == [65536.0] * 3
    assert result.last_step == 9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflow_in_one_of_the_batches_of_a_step_skips_all_of_it(optimizer):
    batches = make_batches(12, large=(5,), by=60.0)
    settings = {"accumulate": 3, "loss_scale": af.LossScale(growth_interval=2)}
    oracle = Oracle(make_model().weight.data, OPTIMIZERS[optimizer], Scaler(interval=2))
    wanted = [oracle.step(*batches[i : i + 3]) for i in range(0, 12, 3)]
    assert [is_kept for *_, is_kept in wanted] == [True, False, True, True]
    model = make_model()
    _, rows = fit(make_job(optimizer, **settings), batches, model)
    np.testing.assert_allclose([r[0] for r in rows], [w[0] for w in wanted], rtol=1e-4)
    assert [r[1] for r in rows] == [w[1] for w in wanted]
    np.testing.assert_allclose(model.weight.data, oracle.w, rtol=1e-3, atol=1e-4)


def test_a_number_is_a_scale_that_stays_and_steps_that_overflow_are_skipped():
    batches = make_batches(6, large=(2, 3))
    result, rows = fit(make_job(loss_scale=65536), batches)
    assert [row[1:] for row in rows] == [(65536.0, n) for n in (0, 0, 1, 2, 2, 2)]
    assert "loss_scale" not in result.variables
    _, rows = fit(make_job(loss_scale=0.5), batches)
    assert [row[1:] for row in rows] == [(0.5, 0)] * 6


def test_without_an_overflow_a_scale_that_is_a_power_of_two_changes_nothing_but_lost_digits():
    batches = make_batches(8)
    ones, _ = fit(make_job(loss_scale=1.0), batches)
    scaled, _ = fit(make_job(), batches)
    np.testing.assert_allclose(
        scaled.variables["weight"], ones.variables["weight"], rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("on_nan", ["raise", "warn", "skip"])
def test_under_any_policy_an_overflow_is_told_and_ends_nothing(on_nan, caplog):
    result, rows = fit(make_job(), make_batches(5, large=(2, 5)), on_nan=on_nan)
    assert [skipped for *_, skipped in rows] == [0, 0, 1, 1, 1]
    assert result.num_skipped == 2
    assert (
        "step 2 is skipped: a gradient or the learning rate is not finite (loss is" in caplog.text
    )
    assert "at a loss scale of 65536" in caplog.text
    assert "2 of 5 steps were skipped" in caplog.text


def test_a_loss_that_no_scale_mends_ends_the_run_and_names_the_step():
    batches = make_batches(40)
    for batch in batches[3:]:
        batch["x"] *= np.float32(1e6)
    model = make_model()
    with raises(af.NonFiniteLoss):
        fit(make_job(), batches, model)
    three, _ = fit(make_job(), batches[:3])
    np.testing.assert_array_equal(model.weight.data, three.variables["weight"])
    with raises(af.NonFiniteLoss):
        fit(make_job(loss_scale=8.0), batches)


def make_gpt(layers=2):
    model = GPT(29, 16, 32, layers=layers, heads=4)
    rng = np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        shape = parameter.type.shape
        is_gain = "norm" in name and name.endswith("weight")
        array = np.ones(shape) if is_gain else rng.normal(0, 0.1, shape)
        parameter.load(array.astype(np.float32))
    return model


def tokens():
    text = np.cumsum(np.random.default_rng(0).integers(0, 5, 5_000)) % 29
    return af.data.Tokens(text.astype(np.uint8), seq=16, batch=4, seed=0)


def gpt_job(precision, **options):
    @af.job(precision=precision, optimizer=af.optim.AdamW(3e-3), **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    return train


def test_twenty_losses_stay_nearer_to_float32_than_those_of_bfloat16(numpys_kernels):
    exact, bf16, fp16 = (
        losses_of_fit(gpt_job(p), make_gpt(), tokens(), 20) for p in ("fp32", "bf16", "fp16")
    )
    apart = [np.abs(np.subtract(x, exact)).max() for x in (fp16, bf16)]
    assert 0 < apart[0] < apart[1] < 2e-2
    assert fp16[-1] < fp16[0]


def test_in_generated_c_twenty_losses_stay_near_those_of_numpys_kernels(monkeypatch):
    found = []
    for native in ("0", "1"):  # one layer: each of its functions takes the compiler a while
        monkeypatch.setenv("ACTORFLOW_NATIVE", native)
        found.append(losses_of_fit(gpt_job("fp16"), make_gpt(layers=1), tokens(), 20))
    np.testing.assert_allclose(found[1], found[0], atol=5e-3)
    assert found[0] != found[1]


ASKED = [
    {"recompute": "blocks"},
    {"offload": "optimizer"},
    {"streams": 2},
    {"metrics_every": 4},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_what_a_job_is_asked_for_changes_no_bit(asked, numpys_kernels):
    batches, scaling = make_batches(8, large=(2, 6)), af.LossScale(growth_interval=2)
    plain, rows = fit(make_job("adamw", loss_scale=scaling), batches)
    result, others = fit(make_job("adamw", loss_scale=scaling, **asked), batches)
    assert others == rows
    assert_same(plain.variables, result.variables)


@pytest.mark.host("the devices are in the test")
def test_devices_skip_the_same_steps_and_find_the_same_scales(native_toolchain, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    batches = make_batches(10, large=(3, 4, 9))
    options = {"loss_scale": af.LossScale(growth_interval=3)}
    found = {
        d: fit(make_job("adamw", device=d, **options), batches) for d in ("host", "sim", "cuda")
    }
    (host, rows), (sim, same), (cuda, near) = found.values()
    assert same == rows
    assert_same(host.variables, sim.variables)
    assert [row[1:] for row in near] == [row[1:] for row in rows]
    np.testing.assert_allclose([r[0] for r in near], [r[0] for r in rows], rtol=1e-4)
    np.testing.assert_allclose(
        cuda.variables["weight"], host.variables["weight"], rtol=1e-3, atol=1e-4
    )


def test_an_evaluation_has_no_scale_and_computes_in_float16_all_the_same(numpys_kernels):
    @af.job(train=False, precision="fp16")
    def evaluate(model, batch):
        return {"loss": af.square(model(batch.x) - batch.t).mean()}

    batches, found = make_batches(4, large=(2,)), []
    held_out = make_batches(2)
    evaluation = af.Evaluation(
        evaluate, source_of(held_out), every=2, batches=2, on_result=lambda s, r: found.append(r)
    )
    model = make_model()
    fit(make_job(), batches, model, evaluation=evaluation)
    assert [result.keys() for result in found] == [{"loss"}] * 2
    x, w = (low(a).astype(np.float64) for a in (held_out[0]["x"], model.weight.data))
    here = evaluate.step(model, held_out[0])["loss"]
    assert here == pytest.approx(np.mean((x @ w.T - held_out[0]["t"]) ** 2), rel=1e-5)
    assert math.isfinite(here)


def test_products_read_float16_and_parameters_and_their_gradients_are_float32(numpys_kernels):
    plan = gpt_job("fp16").compile(make_gpt(), tokens())
    types = {v.name: plan.views[v.view].type.dtype for v in plan.variables}
    assert set(types.values()) == {DType.FLOAT32, DType.INT64}
    launches = [launch for actor in plan.actors for launch in actor.launches]
    products = [launch for launch in launches if "matmul" in launch.made_of]
    assert len(products) == 3 * 9
    for launch in products:
        assert {plan.views[v].type.dtype for v in launch.inputs[:2]} == {DType.FLOAT16}
    for launch in launches:
        if launch.op == "adamw_update":
            views = [plan.views[v].type.dtype for v in (*launch.inputs, *launch.outputs)]
            assert DType.FLOAT16 not in views


@pytest.mark.host("the device is in the text")
def test_a_plan_says_that_the_host_computes_float16_in_float32(numpys_kernels):
    plan = gpt_job("fp16").compile(make_gpt(), tokens())
    assert (
        " on host:0 in fp16 (float32 inside, slower than fp32: the host has" in summarise(plan)[0]
    )
    assert type(plan).from_bytes(plan.to_bytes()) == plan


@pytest.mark.parametrize("value", [0, -2.0, math.nan, math.inf, 1e39, True, "dynamic", (1, 2)])
def test_what_is_no_scale_is_refused_at_its_line(value):
    with raises(af.CompileError):
        make_job(loss_scale=value)


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 0},
        {"init_scale": -1.0},
        {"init_scale": math.nan},
        {"init_scale": "large"},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
    ],
)
def test_settings_of_a_scale_are_refused_at_their_line(settings):
    with raises(af.CompileError):
        af.LossScale(**settings)


def test_a_scale_without_float16_or_training_is_refused_with_what_mends_it():
    for precision in ("fp32", "bf16"):
        with raises(af.CompileError):
            make_job(precision=precision, loss_scale=1024)
    with raises(af.CompileError):
        make_job(train=False, loss_scale=1024)


def test_an_output_or_a_parameter_of_that_name_is_refused():
    @af.job(precision="fp16", optimizer=OPTIMIZERS["sgd"])
    def train(model, batch):
        loss = af.square(model(batch.x) - batch.t).mean()
        return {"loss": loss, "loss_scale": loss * 2.0}

    with raises(af.CompileError):
        train.compile(make_model(), source_of(make_batches(1)))
