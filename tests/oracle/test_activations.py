"""Activations of every kind, their modules, and softmax's relatives."""

from error_texts import raises
from oracle import SHAPES, Case, floats, unary

import actorflow as af
from actorflow import nn

NAMES = (
    *("relu", "sigmoid", "silu", "tanh", "gelu", "selu", "elu", "celu", "relu6", "mish"),
    *("leaky_relu", "softplus", "softsign", "hardtanh", "hardswish", "logsigmoid"),
    *("tanhshrink", "softshrink", "hardshrink"),
)
WIDE = [*unary(), *unary(-40.0, 40.0, [(41,)])]

WITH_ARGUMENTS = {
    "gelu": {"approximate": "tanh"},
    "leaky_relu": {"negative_slope": 0.3},
    "elu": {"alpha": 0.7},
    "celu": {"alpha": 2.0},
    "softplus": {"beta": 2.0, "threshold": 5.0},
    "hardtanh": {"min_val": -0.5, "max_val": 2.0},
    "softshrink": {"lambd": 1.25},
    "hardshrink": {"lambd": 1.25},
    "threshold": {"threshold": 0.5, "value": -3.0},
}

HALVED = [floats((n, 2 * m, 3), key=(n, m)) for n in (1, 2, 5, 0) for m in (1, 2, 3, 4, 8)]
ROWS = [floats((n, m, 3), key=(n, m)) for n in (1, 2) for m in range(1, 11)]

MODULES = (
    (nn.GELU(approximate="tanh"), "GELU", {"approximate": "tanh"}),
    (nn.LeakyReLU(0.2), "LeakyReLU", {"negative_slope": 0.2}),
    (nn.Softmax(1), "Softmax", {"dim": 1}),
    (nn.ELU(), "ELU", {}),
    (nn.Threshold(0.1, 2.0), "Threshold", {"threshold": 0.1, "value": 2.0}),
)


def torchs(t, name):
    return getattr(t.nn.functional, name)


CASES = [
    *[
        Case(name, getattr(af, name), lambda t, x, name=name: torchs(t, name)(x), WIDE)
        for name in NAMES
    ],
    *[
        Case(
            f"{name} with arguments",
            lambda x, name=name, given=given: getattr(af, name)(x, **given),
            lambda t, x, name=name, given=given: torchs(t, name)(x, **given),
            WIDE,
        )
        for name, given in WITH_ARGUMENTS.items()
    ],
    Case(
        "prelu of one number",
        af.prelu,
        lambda t, x, w: t.nn.functional.prelu(x, w),
        [(*floats(shape), *floats((1,), key=1)) for shape in SHAPES],
    ),
    Case(
        "prelu by channel",
        af.prelu,
        lambda t, x, w: t.nn.functional.prelu(x, w),
        [
            floats((n, c, *rest), (c,))
            for n in (1, 3)
            for c in (1, 2, 5, 8, 9)
            for rest in ((), (4,))
        ],
    ),
    Case(  # torch takes a sixth in float32 for its gradient, in float64 too
        "hardsigmoid", af.hardsigmoid, lambda t, x: t.clamp((x + 3) / 6, 0, 1), WIDE
    ),
    Case("glu", lambda x: af.glu(x, 1), lambda t, x: t.nn.functional.glu(x, 1), HALVED),
    *[
        Case(
            f"{name} of axis {dim}",
            lambda x, name=name, dim=dim: getattr(af, name)(x, dim),
            lambda t, x, name=name, dim=dim: torchs(t, name)(x, dim=dim),
            ROWS,
        )
        for name in ("log_softmax", "softmin")
        for dim in (1, -1)
    ],
    *[
        Case(
            f"nn.{name}",
            module,
            lambda t, x, name=name, given=given: getattr(t.nn, name)(**given)(x),
            ROWS,
        )
        for module, name, given in MODULES
    ],
]


def test_a_case_agrees_with_torch(case, dtype, agrees):
    agrees(case, dtype)


def test_another_form_of_gelu_is_refused_by_name():
    @af.job(train=False)
    def job(model, batch):
        return af.gelu(batch["x"], approximate="quick")

    with raises(af.CompileError):
        job.step(nn.Module(), {"x": floats((2,))[0]})


def test_a_module_shows_its_arguments_and_refuses_others():
    assert repr(nn.LeakyReLU(0.2)).startswith("LeakyReLU(negative_slope=0.2)")
    with raises(af.CompileError):
        nn.ReLU(slope=1.0)
