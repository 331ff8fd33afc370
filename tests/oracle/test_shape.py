"""Functions that move, repeat and cut elements, and tensors of known numbers."""

import numpy as np
from oracle import SHAPES, Case, floats, seeded

import actorflow as af


def of(*shapes, times=1):
    return [floats(s, key=n) for n, s in enumerate(shapes * times)]


CUBES = of((2, 3, 4), (1, 3, 1), (3, 1, 5), (4, 3, 2), (1, 1, 1), times=4)
MATRICES = of((3, 4), (4, 3), (1, 5), (5, 1), (6, 6), (2, 9), (3, 0), times=3)
VECTORS = [floats((n,), key=n) for n in range(20)]
IMAGES = of((1, 2, 4, 5), (2, 1, 3, 6), (1, 1, 7, 3), (2, 2, 4, 4), times=5)
EVERY = [floats(s, key=n) for n, s in enumerate(SHAPES)]
CLASSES = [(seeded("classes", n).integers(0, 7, (n, 3)),) for n in range(20)]


def several(name, function, sets, **options):
    """Return a case of functions that are called alike: `function` takes the module."""
    return Case(name, lambda *xs: function(af, *xs), function, sets, **options)


def padded(pad, x, mode, widths):
    options = {"value": 1.5} if mode == "of a number" else {"mode": mode}
    return [pad(x, width, **options) for width in widths]


def constants(m, x):
    """Numbers that the job knows; x says which module's dtypes are meant, and how many."""
    n = x.shape[0]
    made = [
        m.arange(n),
        m.arange(1, n + 3),
        m.arange(2, -n, -3),
        m.arange(0.0, n, 0.5),
        m.full((n, 2), 3),
        m.full((2, n), 0.5),
        m.zeros(n, 3),
        m.ones((n,)),
        m.eye(n),
        m.eye(n, 3),
        m.zeros_like(x),
        m.ones_like(x),
        m.full_like(x, 2),
        m.full((2,), x.detach().sum()),
        m.full_like(x, (x > 0).sum()),
        m.full((1, n), (x > 0).any()),
        m.full((n,), (x > 0).sum(), dtype=m.uint8 if hasattr(m, "uint8") else "uint8"),
        *m.meshgrid(m.arange(n), m.arange(3), indexing="ij"),
        *m.meshgrid(m.arange(n), m.arange(3), indexing="xy"),
    ]
    return [x * 1.0, *made]


CASES = [
    several(
        "views",
        lambda m, x: [
            m.squeeze(x),
            m.squeeze(x, 1),
            x.squeeze((0, 1)),
            m.unsqueeze(x, 0),
            x.unsqueeze(-1),
            m.movedim(x, 0, 2),
            m.movedim(x, (0, 1), (-1, 0)),
            m.moveaxis(x, 2, 0),
            m.permute(x, (2, 0, 1)),
            m.transpose(x, 0, 2),
            m.swapaxes(x, 1, 2),
            m.reshape(x, (-1,)),
            x.view(x.shape[2], -1),
            m.select(x, 1, -1),
            m.narrow(x, 0, 0, 1),
            x.view_as(x),
            *m.unbind(x, 1),
            x.expand(2, -1, -1, x.shape[2]),
            x[:1].expand_as(x),
            x.diagonal(0, 2),
        ],
        CUBES,
    ),
    several("stack", lambda m, x: [m.stack([x, x * 2.0], 1), m.stack((x,), -1)], CUBES),
    several("hstack", lambda m, x: [m.hstack([x, x * 2.0]), m.vstack([x, x * 2.0])], VECTORS),
    several("vstack", lambda m, x: [m.vstack([x, x]), m.hstack([x * 3.0, x])], MATRICES),
    several(
        "repeat",
        lambda m, x: [
            x.repeat(2, 1, 3),
            x.repeat(2, 1, 1, 2),
            m.tile(x, (2,)),
            m.tile(x, (2, 1, 1, 3)),
            m.repeat_interleave(x, 2, 1),
            m.repeat_interleave(x, 3),
            x.repeat_interleave(0, 0),
        ],
        CUBES,
    ),
    Case(
        "repeat_interleave by several",
        lambda x: x.repeat_interleave([2, 0, 1], 1),
        lambda t, x: x.repeat_interleave(t.tensor([2, 0, 1]), 1),
        of((2, 3, 4), (1, 3, 1), times=10),
    ),
    several(
        "flip and roll",
        lambda m, x: [
            m.flip(x, (0, -1)),
            m.fliplr(x),
            m.flipud(x),
            m.roll(x, 2),
            m.roll(x, (1, -2), (0, 2)),
            m.rot90(x),
            m.rot90(x, 2, (1, 2)),
            m.rot90(x, -1, (2, 0)),
        ],
        CUBES,
    ),
    several(
        "diagonals",
        lambda m, x: [
            m.diagonal(x),
            m.diagonal(x, 1),
            m.diagonal(x, -2),
            m.diag(x),
            m.diag(x, 2),
            x.trace(),
            m.tril(x),
            m.triu(x),
            m.tril(x, 1),
            m.triu(x, -1),
            m.triu(x, 9),
        ],
        MATRICES,
    ),
    several("diag", lambda m, x: [m.diag(x), m.diag(x, 2), m.diag(x, -1)], VECTORS),
    several(
        "unfold",
        lambda m, x: [x.unfold(1, 2, 1), x.unfold(1, 1, 2), x.unfold(0, 1, 3)],
        of((2, 3, 4), (1, 5, 1), (3, 2, 5), (4, 6, 2), times=5),
    ),
    *[
        Case(
            f"pad {mode}",
            lambda x, mode=mode, widths=widths: [
                af.pad(x, w, **({"mode": mode} if mode != "of a number" else {"value": 1.5}))
                for w in widths
            ],
            lambda t, x, mode=mode, widths=widths: [
                t.nn.functional.pad(
                    x, w, **({"mode": mode} if mode != "of a number" else {"value": 1.5})
                )
                for w in widths
            ],
            IMAGES,
        )
        for mode, widths in {
            "constant": [(1, 2), (0, 1, 2, 0), (-1, 2, 0, -1), (1, 1, 0, 0, 2, 0)],
            "of a number": [(1, 2), (-1, 2, 1, -1)],
            "reflect": [(1, 2, 2, 0), (0, 1, 1, 1)],
            "replicate": [(1, 7, 2, 0)],
            "circular": [(1, 2, 2, 0)],
        }.items()
    ],
    several("known numbers", constants, [floats((n,), key=n) for n in range(2, 22)]),
    Case(
        "one_hot", lambda i: af.one_hot(i, 7), lambda t, i: t.nn.functional.one_hot(i, 7), CLASSES
    ),
    several("squeeze of any", lambda m, x: [m.squeeze(x), m.unsqueeze(x, -1), x.view(-1)], EVERY),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


def test_what_has_no_static_shape_says_so():
    def message(function):
        def compute(model, batch):
            return {"y": function(batch.x)}

        try:
            af.job(train=False)(compute).step(af.nn.Module(), {"x": np.ones((2, 3), np.float32)})
        except af.CompileError as error:
            return str(error)
        raise AssertionError("no error")

    assert "only the data tells" in message(lambda x: x.repeat_interleave(x.to("int64"), 1))
    assert "num_classes of 1 or more" in message(lambda x: af.one_hot(x.to("int64"), -1))
    assert "windows of 0..3 elements" in message(lambda x: x.unfold(1, 4, 1))
    assert "cannot pad axis 1" in message(lambda x: af.pad(x, (3, 0), mode="reflect"))
    assert "as many places as axes" in message(lambda x: x.movedim((0, 1), (1, 1)))
