"""Ops of a user: trained on every path, held to the same formulas in ops that are shipped."""

import ast
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import user_ops as ours
from error_texts import raises
from jobs import losses_of_fit

import actorflow as af
from actorflow import nn
from actorflow.cli.main import main
from actors.race.race import check_races
from compiler.pipeline.printer import print_plan

FILE = Path(ours.__file__)
ROOT = Path(__file__).resolve().parents[2]
LINES = {"softsign": 8, "rms_scale": 12, "group_norm": 20, "weighted_huber": 15}
NEEDS = {"group_norm": ("normal_rows",)}


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Primitive:
    """The same formulas, of tensors alone."""

    @staticmethod
    def softsign(x):
        return x / (1 + af.maximum(x, -x))

    @staticmethod
    def rms_scale(x, gamma, *, eps=1e-6):
        return x / af.sqrt(af.square(x).mean(-1, keepdims=True) + eps) * gamma

    @staticmethod
    def group_norm(x, weight, bias, groups):
        y = x.reshape(x.shape[0], groups, -1)
        y = y - y.mean(-1, keepdims=True)
        y = (y / af.sqrt(af.square(y).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape)
        return y * weight.reshape(-1, 1) + bias.reshape(-1, 1)

    @staticmethod
    def weighted_huber(prediction, target, weight, *, delta=1.0):
        error = af.maximum(prediction - target, target - prediction)
        return weight * af.where(error <= delta, 0.5 * error * error, delta * (error - 0.5 * delta))


class Net(nn.Module):
    def __init__(self, ops):
        self.ops = ops
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 24)
        ones, zeros = (("kind", "ones"),), (("kind", "zeros"),)
        self.gain, self.weight = nn.Parameter((24,), ones), nn.Parameter((6,), ones)
        self.bias = nn.Parameter((6,), zeros)

    def __call__(self, x):
        h = self.ops.rms_scale(self.ops.softsign(self.up(x)), self.gain, eps=1e-5)
        h = self.down(h).reshape(-1, 6, 4)
        return self.ops.group_norm(h, self.weight, self.bias, 2).reshape(-1, 24)


class Deep(nn.Module):
    def __init__(self, ops):
        self.ops, self.blocks = ops, [Net(ops) for _ in range(4)]
        self.cut = nn.Linear(24, 8)

    def __call__(self, x):
        for block in self.blocks:
            x = self.cut(block(x))
        return x


def data(width=24):
    rng = np.random.default_rng(5)
    arrays = {
        "x": rng.normal(size=(64, 8)).astype("f4"),
        "y": 2 * rng.normal(size=(64, width)).astype("f4"),
        "w": rng.uniform(0.5, 1.5, size=(64, 1)).astype("f4"),
    }
    return af.data.ArraySource(arrays, batch=16)


def job_of(ops, **options):
    @af.job(**{"optimizer": af.optim.AdamW(1e-2), **options})
    def train(model, batch):
        return ops.weighted_huber(model(batch.x), batch.y, batch.w, delta=0.7).mean()

    return train


def trained(ops, model=Net, steps=4, **options):
    """Return the plan, losses, and a digest of all that was trained."""
    job, net = job_of(ops, **options), model(ops)
    source = data(24 if model is Net else 8)
    losses = losses_of_fit(job, net, source, steps)
    digest = hashlib.sha256(np.array(losses).tobytes())
    for name, array in sorted(net.state().items()):
        digest.update(name.encode() + array.tobytes())
    return job.compile(net, source), losses, digest.hexdigest()


@pytest.fixture(params=["native", "without a compiler"])
def road(request, monkeypatch):
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


def test_the_ops_of_the_marks_take_few_lines():
    tree = ast.parse(FILE.read_text())
    lines = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *[d.lineno for d in node.decorator_list]])
            lines[node.name] = node.end_lineno - first + 1
    for name, most in LINES.items():
        assert lines[name] + sum(lines[other] for other in NEEDS.get(name, ())) <= most


def test_they_train_like_the_same_formulas_of_shipped_ops(road):
    plan, losses, _ = trained(ours)
    _, expected, _ = trained(Primitive)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    check_races(plan)


def test_in_bfloat16_they_train_nearly_so(road):
    plan, losses, _ = trained(ours, precision="bf16")
    _, expected, _ = trained(ours)
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    check_races(plan)


def test_recomputing_them_changes_no_bit(road):
    free, _, expected = trained(ours, Deep)
    with pytest.raises(af.BudgetError) as caught:
        job_of(ours, memory_budget=1).compile(Deep(ours), data(8))
    budget = (caught.value.smallest_bytes + free.arenas[0].size_bytes) // 2
    plan, _, digest = trained(ours, Deep, memory_budget=budget)
    assert plan.arenas[0].size_bytes <= budget < free.arenas[0].size_bytes
    assert digest == expected
    check_races(plan)


def test_a_norm_of_ones_own_takes_no_more_launches_than_the_one_of_primitives(road):
    def launches(ops):
        plan, _, _ = trained(ops, steps=1)
        return sum(len(a.launches) for a in plan.actors if a.name == "step")

    assert launches(ours) <= launches(Primitive)


@pytest.mark.no_gpu("numpy computes on the host")
def test_an_op_of_numpy_trains_with_a_gradient_of_tensors(road):
    upper = np.tri(24, dtype="f4").T

    class Summed(Primitive):
        prefix_sums = staticmethod(ours.prefix_sums)

        @classmethod
        def weighted_huber(cls, prediction, target, weight, *, delta):
            return Primitive.weighted_huber(
                cls.prefix_sums(prediction), target, weight, delta=delta
            )

    class Multiplied(Summed):
        prefix_sums = staticmethod(lambda x: x @ upper)

    (plan, losses, _), (_, expected, _) = trained(Summed), trained(Multiplied)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    check_races(plan)


def test_the_table_of_ops_shows_them(capsys):
    assert main(["ops", str(FILE)]) == 0
    shown = capsys.readouterr().out
    for name in ("softsign", "rms_scale", "weighted_huber", "prefix_sums"):
        assert f"| {name}" in shown


def test_what_is_wrong_is_told_with_the_users_line():
    with raises(af.CompileError):

        @af.op("x")
        def late(x):
            return x

    with raises(af.CompileError):

        @af.op("x -> y")
        def gelu(x):
            return x

    @af.job(train=False)
    def evaluate(model, batch):
        return ours.rms_scale(batch.x, batch.w)

    with raises(af.CompileError):
        evaluate.compile(nn.Linear(1, 1), data())


def test_a_gradient_that_is_none_is_told_with_the_line_of_the_call():
    own = {"gradient": lambda dy, x: dy * (x > 0), "name": "test bent"}
    bent = af.op("x -> y", **own)(lambda x: x * 2.0 + 1.0)

    @af.job(optimizer=af.optim.AdamW(1e-2))
    def train(model, batch):
        return bent(model(batch.x)).mean()

    with raises(af.CompileError):
        train.compile(nn.Linear(8, 8), data())


def test_a_function_that_is_defined_anew_is_another_op():
    first, second = [loaded("again").softsign for _ in range(2)]

    @af.job(train=False)
    def evaluate(model, batch):
        return (first(batch.x) + second(batch.x)).mean()

    text = "\n".join(print_plan(evaluate.compile(nn.Linear(1, 1), data())))
    assert "softsign#" in text


SCRIPT = """
import sys
import numpy as np
import actorflow as af
from actorflow import nn
from factors import OTHER

@af.op("x -> y")
def bent(x):
    return x * FACTOR * OTHER

@af.job(train=False)
def show(model, batch):
    return bent(batch.x).mean()

source = af.data.ArraySource({"x": np.ones((4, 2), "f4")}, batch=4)
print(next(iter(show.stream(nn.Linear(2, 2), source))))
"""


def test_a_changed_body_finds_no_plan_of_the_old_one(tmp_path):
    """Nor does a number that the body reads from another file."""
    script, said = tmp_path / "script.py", []
    for factor, other in ((2.0, 1.0), (3.0, 1.0), (3.0, 5.0), (3.0, 5.0)):
        script.write_text(SCRIPT.replace("FACTOR", repr(factor)))
        (tmp_path / "factors.py").write_text(f"OTHER = {other}")
        run = subprocess.run(
            [sys.executable, "-B", str(script)],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        said.append(run.stdout.strip())
    assert len(set(said)) == 3
    assert len([*(Path(os.environ["ACTORFLOW_CACHE"])).glob("*.plan")]) == 3
