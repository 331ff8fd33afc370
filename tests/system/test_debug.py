"""Looking inside a job: prints, checks, breakpoints, and the op that made the first NaN."""

import builtins
import linecache
import re
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from rank_trainings import on_ranks

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import SettingsError
from actorflow.run.broken_steps import NonFiniteLoss
from compiler.contract.errors import CompileError, PlanFormatError
from compiler.contract.plan import Plan

ROWS = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
"""Batches of 8 for 8 steps."""


def source(x=ROWS, batch=8):
    return af.data.ArraySource({"x": x}, batch=batch, shuffle=False)


class Net(nn.Module):
    def __init__(self):
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def __call__(self, x):
        return self.b(af.tanh(self.a(x)))


def loss(model, batch):
    return (model(batch.x) ** 2.0).mean()


def fit(job, model=None, data=None, steps=2, **options):
    return job.fit(model or Net(), data or source(), steps=steps, progress=False, **options)


def sums(text):
    """Return the numbers of the lines that a print has made."""
    return [float(line.split()[-1]) for line in text.splitlines()]


def test_a_print_shows_what_each_step_computed_in_the_order_of_the_program(capsys):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        af.debug.print("first {:.4f} of {}", batch.x.sum(), batch.x[0, :2])
        af.debug.print("then {}", batch.x.shape[0])
        return loss(model, batch)

    fit(train, steps=3)
    expected = [
        line
        for x in ROWS.reshape(8, 8, 4)[:3]
        for line in (f"first {x.sum(dtype=np.float64):.4f} of {x[0, :2]}", "then 8")
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_print_without_tensors_happens_once_a_step(capsys):
    @af.job(train=False)
    def evaluate(model, batch):
        af.debug.print("here")
        return model(batch.x)

    assert len([*evaluate.stream(Net(), source(), steps=8)]) == 8
    assert capsys.readouterr().out == "here\n" * 8


def test_a_step_with_prints_computes_the_bits_of_one_without(capsys):
    def watched(model, batch):
        h = model.a(batch.x)
        af.debug.print("{}", h)
        af.debug.check(h * 2.0)
        y = model.b(af.tanh(h))
        af.debug.print("{}", af.tanh(h))
        return (y**2.0).mean()

    results = []
    for function in (watched, loss):
        model = Net()
        job = af.job(function, optimizer=af.optim.AdamW(1e-2))
        results.append((fit(job, model, steps=4).metrics, model.state()))
    (metrics, state), (metrics_without, state_without) = results
    assert metrics == metrics_without
    for name, array in state.items():
        np.testing.assert_array_equal(array, state_without[name])


def test_a_print_in_the_middle_of_what_is_one_kernel_shows_its_value(capsys):
    @af.job(optimizer=af.optim.SGD(0.0), trainable=["b.bias"])
    def train(model, batch):
        h = af.tanh(batch.x * 2.0 + 1.0)
        af.debug.print("{:.5f}", (h * 3.0).sum())
        return (model.b.bias * (h * 3.0 - 1.0)).sum()

    fit(train, steps=2)
    wanted = [(np.tanh(x * 2.0 + 1.0) * 3.0).sum() for x in ROWS.reshape(8, 8, 4)[:2]]
    assert sums(capsys.readouterr().out) == pytest.approx(wanted, abs=1e-3)


def test_each_batch_of_a_step_is_shown_though_outputs_are_means(capsys):
    @af.job(optimizer=af.optim.SGD(0.1), accumulate=4)
    def train(model, batch):
        af.debug.print("{:.4f}", batch.x.sum())
        return loss(model, batch)

    metrics = fit(train, steps=2).metrics
    assert sums(capsys.readouterr().out) == pytest.approx(ROWS.reshape(8, 32).sum(1), abs=1e-4)
    assert set(metrics) == {"loss"}


def test_metrics_of_several_steps_that_come_together_are_shown_one_by_one(capsys):
    @af.job(optimizer=af.optim.SGD(0.1), metrics_every=4)
    def train(model, batch):
        af.debug.print("{:.4f}", batch.x.sum())
        return loss(model, batch)

    fit(train, steps=6)
    assert sums(capsys.readouterr().out) == pytest.approx(ROWS.reshape(8, 32).sum(1)[:6], abs=1e-4)


@pytest.mark.parametrize("is_reverse", [False, True])
def test_a_print_in_a_scan_happens_at_each_iteration_in_its_order(is_reverse, capsys):
    @af.job(optimizer=af.optim.SGD(0.1), trainable=["b.weight"])
    def train(model, batch):
        def step(carry, row):
            af.debug.print("carry {}", carry.to("int64"))
            af.debug.print("row {}", row.to("int64"))
            return carry + row, None

        total, _ = af.scan(step, af.zeros(()), batch.i, reverse=is_reverse)
        return (model.b.weight * total).mean()

    data = af.data.ArraySource({"i": np.arange(1, 5, dtype=np.float32)}, batch=4, shuffle=False)
    fit(train, data=data, steps=1)
    rows = [4, 3, 2, 1] if is_reverse else [1, 2, 3, 4]
    carries = [0, *np.cumsum(rows)[:-1]]
    expected = [
        f"{n} {v}"
        for c, r in zip(carries, rows, strict=True)
        for n, v in (("carry", c), ("row", r))
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_print_in_a_scan_of_a_scan_names_every_pair(capsys):
    @af.job(train=False)
    def pairs(model, batch):
        def outer(carry, i):
            def inner(held, j):
                af.debug.print("{} {}", i, j)
                return held, None

            return af.scan(inner, carry, batch.j)[0], None

        return af.scan(outer, af.zeros(()), batch.i)[0]

    arrays = {"i": np.arange(2, dtype=np.int64), "j": np.arange(2, dtype=np.int64) + 7}
    pairs.step(Net(), arrays)
    assert capsys.readouterr().out.splitlines() == ["0 7", "0 8", "1 7", "1 8"]


def test_a_check_names_the_step_the_batch_and_its_line():
    @af.job(optimizer=af.optim.SGD(0.1), accumulate=2)
    def train(model, batch):
        af.debug.check(batch.x)
        return loss(model, batch)

    x = ROWS.copy()
    x[8 * 5] = np.nan
    with raises(af.debug.CheckFailed):
        fit(train, data=source(x), steps=4)


def test_a_check_by_a_predicate_names_it():
    def is_small(array):
        return np.abs(array).max() < 2.0

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        af.debug.check(batch.x, is_small)
        return loss(model, batch)

    fit(train, data=source(np.clip(ROWS, -1.5, 1.5)))
    with raises(af.debug.CheckFailed):
        fit(train, data=source(ROWS * 0 + 3))


def test_a_predicate_that_raises_is_told_with_its_line():
    @af.job(train=False)
    def evaluate(model, batch):
        af.debug.check(batch.x, lambda array: array.no_such_method())
        return model(batch.x)

    with raises(af.debug.CheckFailed):
        evaluate.step(Net(), {"x": ROWS[:8]})


def test_a_predicate_is_that_of_the_newest_trace():
    limit = 10.0

    @af.job(train=False)
    def evaluate(model, batch):
        af.debug.check(batch.x, lambda array: array.max() < limit)
        return model(batch.x)

    model, batch = Net(), {"x": ROWS[:8]}
    evaluate.step(model, batch)
    limit = 0.0
    with pytest.raises(af.debug.CheckFailed):
        evaluate.step(model, batch)


def test_a_check_of_an_evaluation_is_made_by_the_predicate_of_its_job():
    @af.job(train=False)
    def watched(model, batch):
        value = loss(model, batch)
        af.debug.check(value, lambda array: array < 0)
        return value

    train = af.job(loss, optimizer=af.optim.SGD(0.1))
    with raises(af.debug.CheckFailed):
        fit(train, evaluation=af.Evaluation(watched, source(), every=1, batches=2))


def test_a_breakpoint_has_the_values_and_holds_the_run(monkeypatch):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        h = model.a(batch.x)
        af.debug.breakpoint(h, h.sum())
        return (model.b(h) ** 2.0).mean()

    model, seen, weights = Net(), [], []

    def stop():
        import sys

        seen.append(sys._getframe(1).f_locals["values"])
        weights.append(model.state()["a.weight"])

    monkeypatch.setattr(builtins, "breakpoint", stop)
    fit(train, model, steps=3)
    for h, total in seen:
        assert h.shape == (8, 8)
        assert total == pytest.approx(h.sum(), abs=1e-3)
    assert len(seen) == 3
    assert not np.array_equal(weights[0], weights[1])


def test_a_plan_from_a_file_prints_and_leaves_out_predicates(tmp_path, capsys, caplog):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        af.debug.print("sum {:.4f}", batch.x.sum())
        af.debug.check(batch.x, lambda array: False)
        return loss(model, batch)

    train.compile(Net(), source()).save(tmp_path / "plan")
    runner = af.Runner(Plan.load(tmp_path / "plan"))
    warnings = []
    for _ in runner.stream(source(), steps=2):
        warnings = [r.message for r in caplog.records]
    assert len(sums(capsys.readouterr().out)) == 2
    assert len([text for text in warnings if "af.debug.check is left out" in text]) == 1


def test_a_plan_with_a_probe_that_is_none_is_refused():
    from compiler.contract.probe import ValueRange, read_probe

    for name in ("debug/", "debug/1/0/shout//x", "debug/1/0/print/a/x", "debug/-1/0/print//"):
        with pytest.raises(PlanFormatError):
            read_probe(name)
    for text in ("", "a|b|c|d", "a|b|1,-2|d"):
        with pytest.raises(PlanFormatError):
            ValueRange.parse(text)


MISUSES = {
    "format": lambda x: af.debug.print("{:.3f}", x),
    "too_few": lambda x: af.debug.print("{}", x, x),
    "too_many": lambda x: af.debug.print("{} {}", x),
    "no_format": lambda x: af.debug.print(x),
    "unclosed": lambda x: af.debug.print("{", x),
    "integer": lambda x: af.debug.check((x * 2.0).to("int64")),
    "text": lambda x: af.debug.check("x"),
    "predicate": lambda x: af.debug.check(x, 3),
    "cond": lambda x: af.cond(x.sum() > 0, lambda: [af.debug.print("{}", x), x][1], lambda: x),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuses_are_errors_on_the_line_of_the_user(misuse):
    @af.job(train=False)
    def evaluate(model, batch):
        MISUSES[misuse](batch.x)
        return batch.x

    with raises(CompileError):
        evaluate.step(Net(), {"x": ROWS[:8]})


def test_outside_of_a_job_there_is_nothing_to_look_into():
    with raises(CompileError):
        af.debug.print("x")
    with raises(CompileError):
        af.debug.check(ROWS)
    with raises(CompileError):
        af.debug.breakpoint()


def test_an_output_may_not_have_the_name_of_a_probe():
    with raises(CompileError):
        af.job(lambda model, batch: {"debug/1": batch.x}, train=False).step(Net(), {"x": ROWS})


# The op that made the first NaN.


class Root(nn.Module):
    """The value is finite at 0, and the gradient is not."""

    def __init__(self):
        self.layer = nn.Linear(4, 3, bias=False)

    def __call__(self, x):
        return af.sqrt(self.layer(x) ** 2.0)


class Log(nn.Module):
    def __init__(self):
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def __call__(self, x):
        return self.b(af.log(self.a(x)))


def with_value(value, row, x=ROWS):
    changed = x.copy()
    changed[row, 0] = value
    return changed


def mean(model, batch):
    return model(batch.x).mean()


def test_the_error_of_a_broken_loss_names_the_switch():
    with raises(NonFiniteLoss):
        fit(af.job(mean, optimizer=af.optim.SGD(0.1)), Log())


@pytest.mark.parametrize("is_asked_by", ["option", "environment"])
def test_the_op_of_the_first_nan_is_named_with_its_line_and_what_it_reads(is_asked_by, monkeypatch):
    options = {"debug": "nan"} if is_asked_by == "option" else {}
    if not options:
        monkeypatch.setenv("ACTORFLOW_DEBUG", "nan")
    with raises(NonFiniteLoss):
        fit(af.job(mean, optimizer=af.optim.SGD(0.1), **options), Log())


def test_a_gradient_is_named_where_its_forward_pass_is_finite():
    train = af.job(mean, optimizer=af.optim.SGD(0.1), debug="nan")
    with raises(NonFiniteLoss):
        fit(train, Root(), source(ROWS * 0))


def test_an_infinity_counts_where_it_is_asked_for():
    def exponential(model, batch):
        # The same numbers by every library: of a product the last bits differ.
        return af.where((y := af.exp(af.where(batch.x > 0.0, 100.0, 0.0))) < 1.0, y, 0.0).sum()

    evaluate = af.job(exponential, train=False, debug="inf")
    model = Net()
    af.job(exponential, train=False, debug="nan").step(model, {"x": ROWS})
    with raises(NonFiniteLoss):
        evaluate.step(model, {"x": ROWS})


def test_the_third_of_eight_batches_is_told():
    @af.job(optimizer=af.optim.SGD(0.1), debug="nan", accumulate=8, trainable=["b.bias"])
    def train(model, batch):
        return (af.log(batch.x) * model.b.bias).sum()

    with raises(NonFiniteLoss):
        fit(train, data=source(with_value(-1.0, 2 * 8 + 3, np.abs(ROWS) + 1.0)), steps=1)


def test_a_nan_of_the_batch_is_told_from_one_that_an_op_made():
    train = af.job(loss, optimizer=af.optim.SGD(0.1), debug="nan")
    with raises(NonFiniteLoss):
        fit(train, data=source(with_value(np.nan, 12)))


def test_a_nan_of_a_parameter_is_told_from_one_that_an_op_made():
    train = af.job(loss, optimizer=af.optim.SGD(0.1), debug="nan")
    model = Net()
    fit(af.job(loss, optimizer=af.optim.SGD(0.1)), model, steps=1)
    model.b.bias.data = np.full(1, np.nan, np.float32)
    with raises(NonFiniteLoss):
        fit(train, model)


def test_a_nan_of_the_batch_that_no_op_keeps_is_no_fault():
    def masked(model, batch):
        return (model(af.nan_to_num(batch.x)) ** 2.0).mean()

    train = af.job(masked, optimizer=af.optim.SGD(0.1), debug="nan")
    fit(train, data=source(with_value(np.nan, 12)))


def test_the_iteration_of_a_scan_is_told():
    @af.job(optimizer=af.optim.SGD(0.1), trainable=["b.weight"], debug="nan")
    def train(model, batch):
        def step(carry, x):
            held = carry - x.mean()
            return held, af.log(held)

        _, ys = af.scan(step, af.zeros(()) + 10.0, batch.x)
        return (ys.sum() * model.b.weight).sum()

    x = np.ones((8, 4), np.float32) * np.array([1, 2, 3, 3.5, 9, 1, 1, 1], np.float32)[:, None]
    with raises(NonFiniteLoss):
        fit(train, data=source(x), steps=1)


@pytest.mark.parametrize("on_nan", ["warn", "skip"])
def test_a_run_that_goes_on_tells_of_the_op_in_its_log(on_nan, caplog):
    train = af.job(loss, optimizer=af.optim.SGD(0.1), debug="nan")
    fit(train, data=source(with_value(np.nan, 3)), on_nan=on_nan, steps=2)
    assert any("batch['x']" in record.message for record in caplog.records)


def named_line(error):
    """Return the line of this file that an error names."""
    number = re.search(r"test_debug\.py:(\d+)", str(error))[1]
    return linecache.getline(__file__, int(number)).strip()


class FusedLog(nn.Module):
    """The log is one kernel with the ops around it, each of which has its line."""

    def __init__(self):
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def __call__(self, x):
        h = af.tanh(self.a(x)) - 3.0
        h = af.log(h)
        h = h * 0.5
        return self.b(af.relu(h))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_op_that_is_fused_with_others_is_named_with_its_own_line(precision):
    train = af.job(mean, optimizer=af.optim.SGD(0.1), debug="nan", precision=precision)
    with pytest.raises(NonFiniteLoss, match=r"^log \(") as caught:
        fit(train, FusedLog())
    assert named_line(caught.value) == "h = af.log(h)"


def test_a_loss_that_is_fused_with_other_outputs_is_named_with_its_own_line():
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        y = model(batch.x)
        broken = af.log(y - 100.0).mean()
        twice = broken * 2.0
        return {"loss": broken, "twice": twice, "more": twice + y.mean()}

    with pytest.raises(NonFiniteLoss) as caught:
        fit(train)
    assert named_line(caught.value) == "broken = af.log(y - 100.0).mean()"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_looking_for_a_nan_changes_no_bit_of_a_training(precision, accumulate):
    results = []
    for debug in (None, "inf"):
        model = Net()
        job = af.job(
            loss, optimizer=af.optim.AdamW(1e-2), clip_norm=0.5, precision=precision,
            accumulate=accumulate, debug=debug,
        )  # fmt: skip
        metrics = fit(job, model, steps=3).metrics
        results.append((metrics, model.state()))
    (metrics, state), (metrics_without, state_without) = results
    assert metrics == metrics_without
    for name, array in state.items():
        np.testing.assert_array_equal(array, state_without[name])


def test_an_unknown_word_is_an_error(monkeypatch):
    with raises(CompileError):
        af.job(loss, optimizer=af.optim.SGD(0.1), debug="all")
    monkeypatch.setenv("ACTORFLOW_DEBUG", "yes")
    with raises(SettingsError):
        fit(af.job(loss, optimizer=af.optim.SGD(0.1)))


@pytest.mark.usefixtures("native_toolchain")
def test_every_rank_prints_the_whole_tensor_with_its_number(capsys):
    def watched(model, batch):
        af.debug.print("{:.4f} {}", batch.x.sum(), batch.x[:2, 0])
        return loss(model, batch)

    def one(group):
        job = af.job(watched, optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
        plan = job.compile(Net(), source(), rank=group.rank)
        af.Runner(plan, group=group).fit(source(), steps=2, progress=False)

    on_ranks(af.Mesh(data=2), one)
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [
            f"[rank {rank}] {x.sum():.4f} {x[:2, 0]}" for x in ROWS.reshape(8, 8, 4)[:2]
        ]


@pytest.mark.usefixtures("native_toolchain")
def test_the_rank_that_made_a_nan_names_its_op():
    def one(group):
        job = af.job(mean, optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2), debug="nan", seed=3)
        plan = job.compile(Log(), source(), rank=group.rank)
        try:
            af.Runner(plan, group=group, seed=3).fit(source(), steps=2, progress=False)
        except af.ActorflowError as error:
            return str(error)
        return ""

    texts = on_ranks(af.Mesh(data=2), one)
    assert [text for text in texts if "log (" in text and "is the first op" in text], texts


@pytest.mark.parametrize(
    "name",
    [
        "debug/1/0/shout//x",
        "debug/1/1/print//{}",
        "debug/1/0/print/7/{}",
        "debug/1/0/print//{0.base}",
        "debug/1/0/print//{:9999999}",
        "debug/1/0/print//{} {}",
        "debug/1/0/range//forward|float32[]||log",
    ],
)
def test_a_plan_that_was_edited_shows_nothing_that_it_may_not(name):
    @af.job(train=False)
    def evaluate(model, batch):
        af.debug.print("{}", model(batch.x).sum())
        return batch.x

    plan = evaluate.compile(Net(), source())
    fields = [replace(f, name=name) if f.name.startswith("debug/") else f for f in plan.fields]
    with pytest.raises(PlanFormatError):
        next(iter(af.Runner(replace(plan, fields=tuple(fields))).stream(source())))


def test_the_gradient_of_a_scan_is_looked_through_and_computes_the_same_bits():
    def recurrent(model, batch):
        def step(h, x):
            h = af.tanh(model.a(x)[:4] + h)
            return h, h

        return (af.scan(step, af.zeros((4,)), batch.x)[1] ** 2.0).mean() + 0 * model.b.bias.sum()

    results = []
    for debug in (None, "inf"):
        job = af.job(recurrent, optimizer=af.optim.SGD(0.1), debug=debug, trainable=["a.*"])
        model = Net()
        results.append((fit(job, model).metrics, model.state()))
    (metrics, state), (metrics_without, state_without) = results
    assert metrics == metrics_without
    np.testing.assert_array_equal(state["a.weight"], state_without["a.weight"])
