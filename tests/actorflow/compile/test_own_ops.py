"""Ops of a user that are stated wrongly: where it is told, with which words; and odd right ones."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.types import DType, TensorType

ROOT = Path(__file__).resolve().parents[3]
X = np.random.default_rng(0).normal(size=(4, 6)).astype("f4")
LONG = "x[*, D] -> y[*, D]"


def of_program(function, signature="x -> y", **options):
    return af.op(signature, **options)(function)


def of_numpy(gradient=None, types=LONG, body=None):
    def cubes(x, y, *, k: float = 1.0):
        y[...] = k * x**3

    return af.numpy_op(types, gradient=gradient)(body or cubes)


def shown(function, *arrays, **options):
    """Return what a function of tensors gives for some arrays."""

    @af.job(train=False, **options)
    def show(model, batch):
        return {"y": function(*[batch[f"x{i}"] for i in range(len(arrays))])}

    return show.step(nn.Linear(1, 1), {f"x{i}": a for i, a in enumerate(arrays)})["y"]


class Table(nn.Module):
    def __init__(self):
        self.x = nn.Parameter(X.shape, (("kind", "zeros"),))


def pulled(function):
    """Return the gradient of the sum of a function at X: what one step of SGD takes away."""

    @af.job(optimizer=af.optim.SGD(1.0))
    def train(model, batch):
        return function(model.x).sum()

    table = Table()
    table.load({"x": X})
    train.step(table, {"unused": np.zeros(1, "f4")})
    return X - table.state()["x"]


DEFINED = {
    "a number": lambda: af.op(5),
    "no brackets": lambda: af.op(lambda x: x),
    "a ufunc": lambda: of_program(np.tanh),
    "no brackets, numpy": lambda: shown(af.numpy_op(lambda x, y: None), X),
    "types of 5": lambda: of_numpy(types=5),
    "few": lambda: of_program(lambda x: x, "x, z -> y"),
    "few arrays": lambda: of_numpy(body=lambda x: None),
    "many": lambda: of_program(lambda x, z: x),
    "bool": lambda: of_program(lambda x: x > 0),
    "no bool": lambda: of_program(lambda x: x * 2, "x -> y: bool"),
    "int out": lambda: of_program(lambda x: x, "x -> y: int"),
    "no dtype": lambda: of_program(lambda x: x, "x: int -> y"),
    "rows": lambda: of_program(lambda x: x / x.sum()),
    "fails": lambda: of_program(lambda x: x.foo),
    "array": lambda: of_program(lambda x: x * X),
    "default": lambda: of_numpy(body=lambda x, y, *, n=[1]: 0),
    "no dy": lambda: of_program(abs_of, gradient=lambda dz: dz),
    "and z": lambda: of_program(abs_of, gradient=lambda dy, z: dy),
    "only x": lambda: of_program(abs_of, gradient=lambda x: x),
    "an attribute": lambda: of_program(abs_of, gradient=lambda dy, *, k: dy),
    "numpy, no dy": lambda: of_numpy(lambda dz: dz),
    "numpy, stars": lambda: of_numpy(lambda *dy: dy),
    "numpy, k": lambda: of_numpy(lambda dy, *, q: dy),
    "numpy, 5": lambda: of_numpy(5),
}


def abs_of(x):
    return abs(x) + 1


@pytest.mark.parametrize("case", DEFINED)
def test_what_makes_no_op_is_refused_where_it_is_defined(case):
    make = DEFINED[case]
    with raises(af.CompileError):
        make()


def typed(result):
    """Return an op whose types are stated by a function."""
    return of_numpy(types=lambda t: result)


TYPE = TensorType(DType.FLOAT32, (2,))
CALLED = {
    "integers": lambda: of_program(lambda x: x / 2, "x: number -> y"),
    "no type": lambda: typed(None),
    "no types": lambda: typed(()),
    "numpy's dtype": lambda: typed(TensorType(np.int8, (2,))),
    "a negative extent": lambda: typed(TensorType(DType.INT8, (-2,))),
    "two types": lambda: typed((TYPE, TYPE)),
    "types fail": lambda: of_numpy(types=lambda t: t[3]),
    "types of two": lambda: of_numpy(types=lambda t, u: t),
    "a list": lambda: lambda x: of_numpy()(x, k=[1]),
    "too large": lambda: lambda x: of_numpy()(x, k=1 << 70),
    "a text": lambda: lambda x: of_numpy()(x, k="1"),
    "unknown": lambda: lambda x: of_numpy()(x, q=1),
}


@pytest.mark.parametrize("case", CALLED)
def test_what_an_op_cannot_take_is_told_with_the_line_that_calls_it(case):
    make = CALLED[case]
    array = X.astype("i8") if case == "integers" else X
    with raises(af.CompileError):
        shown(make(), array)


PULLED = {
    "two of one": lambda: of_numpy(lambda dy: (dy, dy)),
    "none of one": lambda: of_numpy(lambda dy: ()),
    "a number": lambda: of_numpy(lambda dy: 0.0),
    "a shape": lambda: of_numpy(lambda dy: dy.sum()),
    "a failure": lambda: of_numpy(lambda dy: dy.foo),
    "a name": lambda: of_numpy(lambda dx: dx, lambda t: t),
    "random": lambda: of_numpy(lambda dy: af.dropout(dy, 0.5)),
    "of program": lambda: of_program(abs_of, gradient=lambda dy: (dy, dy)),
    "bool": lambda: of_program(abs_of, gradient=lambda dy: dy > 0),
    "float": lambda: of_program(abs_of, gradient=lambda dy: 1.0),
}


@pytest.mark.parametrize("case", PULLED)
def test_a_gradient_that_gives_something_else_is_told_with_the_line_of_the_call(case):
    make = PULLED[case]
    with raises(af.CompileError):
        pulled(make())


def writes(x, y):
    x += 1


RUN = {
    "a result": lambda x, y: x * 2,
    "nothing": lambda x, y: None,
    "an operand": writes,
    "another shape": lambda x, y: y.__setitem__(..., np.ones(7)),
}


@pytest.mark.parametrize("case", RUN)
def test_a_numpy_function_that_fills_no_output_fails_the_step(case):
    body = RUN[case]
    with raises(af.ActorFailed):
        shown(of_numpy(body=body), X)


ONE = np.float32(1)


def scaled(x, *, by: float | None = None, plus=ONE):
    return (x if by is None else x * by) + plus


def two(x, y, z):
    y[...], z[...] = 2 * x, (x * x).sum(-1)


TWO = af.numpy_op("x[*, D] -> y[*, D], z[*]", gradient=lambda dy, dz, x: 2 * (dy + column(dz) * x))(
    two
)


def column(x):
    return x.reshape(-1, 1)


def test_odd_statements_that_are_right_compute_what_they_say():
    op = of_program(scaled)
    np.testing.assert_allclose(shown(lambda x: op(x, by=np.float64(2)), X), 2 * X + 1, 1e-6)
    np.testing.assert_allclose(shown(lambda x: op(x, plus=3.0), X), X + 3, 1e-6)
    np.testing.assert_allclose(shown(of_program(lambda x: np.float32(2) * x), X), 2 * X, 1e-6)
    np.testing.assert_array_equal(shown(of_numpy(body=np_copy), X), X)
    np.testing.assert_array_equal(shown(of_program(lambda x: x > 0, "x -> y: bool"), X), X > 0)


def np_copy(x, y):
    return np.add(x, 0, out=y)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (of_numpy(lambda dy, x, k=3.0: k * x * x * dy), 3 * X * X),
        (of_numpy(lambda dy, x: [3 * x * x * dy]), 3 * X * X),
        (
            of_numpy(lambda dy, x: 3 * x * x * dy, body=lambda *xs: np.power(xs[0], 3, xs[1])),
            3 * X * X,
        ),
        (lambda x: TWO(x)[0], np.full_like(X, 2)),
        (lambda x: TWO(x)[1], 2 * X),
        (lambda x: x * of_numpy()(x.detach()), X**3),
    ],
)
def test_a_gradient_of_tensors_is_taken_as_it_is_stated(function, expected):
    np.testing.assert_allclose(pulled(function), expected, 1e-4, 1e-5)


def test_a_function_that_another_cell_defines_anew_is_another_op():
    cells = [f"@af.op('x -> y')\ndef of_a_cell(x):\n    return x * {k}\n" for k in (2, 3)]
    space = {"af": af, "__name__": "__main__"}
    made = []
    for number, cell in enumerate(cells):
        exec(compile(cell, f"<cell {number}>", "exec"), space)
        made.append(space["of_a_cell"])
    np.testing.assert_array_equal(shown(lambda x: made[0](x) + made[1](x), X), 2 * X + 3 * X)


FACTOR = {"by": 1.0}


@af.op("x[*, D] -> y[*, D]")
def by_factor(x):
    return x * FACTOR["by"]


@af.op("x -> y", gradient=lambda dy: dy * FACTOR["by"])
def by_three(x):
    return x * 3.0 + 1.0


@af.numpy_op("x -> y", gradient=lambda dy: dy * FACTOR["by"])
def as_it_is(x, y):
    y[...] = x


@pytest.mark.parametrize("op", [by_factor, by_three, as_it_is])
def test_what_a_program_or_a_gradient_reads_may_change_between_steps(op, monkeypatch):
    table = Table()
    job = af.job(lambda model, batch: op(model.x).sum(), optimizer=af.optim.SGD(1.0))
    for factor in (1.0, 5.0):
        monkeypatch.setitem(FACTOR, "by", factor)
        table.load({"x": X})
        job.step(table, {"unused": np.zeros(1, "f4")})
        np.testing.assert_allclose(X - table.state()["x"], np.full_like(X, factor), 1e-5)


def test_an_op_and_a_helper_that_is_called_like_its_gradient_live_together():
    helper = of_program(lambda x: 2 * x, name="mine_grad")
    op = of_program(abs_of, name="mine")
    assert shown(lambda x: helper(op(x)), X).shape == X.shape
    np.testing.assert_array_equal(pulled(op), np.sign(X))
    with raises(af.CompileError):
        of_program(abs_of, name="a\nb")


STALE = """
import numpy as np
import actorflow as af
from actorflow import nn
from pulls import pull

@af.numpy_op("x -> y", gradient=pull)
def same(x, y):
    y[...] = x

class Model(nn.Module):
    def __init__(self):
        self.x = nn.Parameter((2,), (("kind", "zeros"),))

@af.job(optimizer=af.optim.SGD(1.0))
def train(model, batch):
    return same(model.x).sum()

model = Model()
train.step(model, {"unused": np.zeros(1, "f4")})
print(model.state()["x"])
"""


def test_a_gradient_of_another_file_finds_no_plan_of_the_old_one(tmp_path):
    said = []
    (tmp_path / "script.py").write_text(STALE)
    for factor in (1.0, 5.0):
        (tmp_path / "pulls.py").write_text(f"def pull(dy):\n    return dy * {factor}\n")
        command = [sys.executable, "-B", str(tmp_path / "script.py")]
        run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        said.append(run.stdout.strip())
    assert said == ["[-1. -1.]", "[-5. -5.]"]
