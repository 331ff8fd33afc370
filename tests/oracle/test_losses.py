"""Losses: of regression, of distances, of classes."""

import numpy as np
import pytest
from error_texts import raises
from oracle import Case, floats, seeded

import actorflow as af

ROWS = [(n, c) for n in (1, 2, 5, 33, 8) for c in (1, 2, 7, 40)]
SPATIAL = [(n, c, a, b) for n in (1, 2, 3) for c in (1, 3, 5) for a, b in ((1, 4), (3, 1), (2, 3))]


def pair(low=-3.0, high=3.0, target=(-3.0, 3.0)):
    """Return inputs and targets of many shapes, of which the last do not broadcast."""
    shapes = [(), (1,), (5,), (3, 4), (1, 7), (4, 1), (33,), (2, 3, 4), (1, 1, 1), (2, 1, 5)]
    shapes += [(16, 65), (129,), (2, 3, 1, 4), (8, 32), (1, 40), (40, 1), (5, 3, 17), (2, 2), (9,)]
    shapes += [(6, 2)]
    return [
        (
            *floats(s, low=low, high=high, key=s),
            *floats(s, low=target[0], high=target[1], key=(s, 1)),
        )
        for s in shapes
    ]


def labels(shape, classes, ignored=None):
    """Return labels, of which some are `ignored`, but never the first."""
    rng = seeded(shape, classes)
    found = rng.integers(0, classes, shape)
    if ignored is not None:
        is_ignored = rng.random(shape) < 0.3
        is_ignored.reshape(-1)[0] = False
        found = np.where(is_ignored, ignored, found)
    return found


def classes(shapes=ROWS, ignored=None):
    """Return logits with their labels."""
    return [(floats(s, key=s)[0], labels((*s[:1], *s[2:]), s[1], ignored)) for s in shapes]


def probabilities(shapes=ROWS):
    """Return logits with probabilities of the same shape."""
    made = []
    for s in shapes:
        x, y = floats(s, s, key=s)
        e = np.exp(y)
        made.append((x, e / e.sum(1, keepdims=True)))
    return made


def signs(*shapes):
    return np.where(seeded("signs", shapes).random(*shapes) < 0.5, 1.0, -1.0)


def weights(n):
    return seeded("class weights", n).uniform(0.2, 2.0, n)


def of_classes(name, kwargs, sets, *, weighted=False, function="cross_entropy"):
    """Return a case of cross_entropy or nll_loss with options."""

    def own(x, y):
        more = {"weight": weights(x.shape[1]).astype(x.dtype.value)} if weighted else {}
        return getattr(af, function)(x, y, **kwargs, **more)

    def torchs(t, x, y):
        more = {"weight": t.tensor(weights(x.shape[1]))} if weighted else {}
        return getattr(t.nn.functional, function)(x, y, **kwargs, **more)

    return Case(name, own, torchs, sets)


def plain(name, sets, *variants, note="", constants=0):
    """Return a case of a loss by each of some sets of options, all of them in one."""

    def held(args):
        first = len(args) - constants
        return [*args[:first], *[x.detach() for x in args[first:]]]

    variants = variants or ({}, {"reduction": "sum"}, {"reduction": "none"})
    return Case(
        name + note,
        lambda *args: [getattr(af, name)(*held(args), **kwargs) for kwargs in variants],
        lambda t, *args: [
            getattr(t.nn.functional, name)(*held(args), **kwargs) for kwargs in variants
        ],
        sets,
    )


def vectors(*signed, count=3):
    """Return several tensors [N, D], and perhaps signs [N]."""
    shapes = [(n, d) for n in (1, 2, 5, 9, 33) for d in (2, 3, 8, 40)]
    return [(*floats(*[s] * count, key=s), *[signs(s[0]) for _ in signed]) for s in shapes]


NONE, SUM = {"reduction": "none"}, {"reduction": "sum"}

CASES = [
    of_classes("cross_entropy of some ignored", {"ignore_index": -100}, classes(ignored=-100)),
    of_classes("cross_entropy none", {"ignore_index": 0, **NONE}, classes()),
    of_classes("cross_entropy sum", SUM, classes()),
    of_classes("cross_entropy weighted", {}, classes(), weighted=True),
    of_classes(
        "cross_entropy weighted, some ignored",
        {"ignore_index": 1},
        classes([(n + 1, c) for n, c in ROWS if c > 2] * 2),
        weighted=True,
    ),
    of_classes("cross_entropy smoothed", {"label_smoothing": 0.1}, classes()),
    of_classes(
        "cross_entropy smoothed, weighted, some ignored",
        {"label_smoothing": 0.3, "ignore_index": -1},
        classes(ignored=-1),
        weighted=True,
    ),
    of_classes("cross_entropy of pixels", {"ignore_index": -1}, classes(SPATIAL, -1)),
    of_classes("cross_entropy of pixels, none", NONE, classes(SPATIAL), weighted=True),
    of_classes("cross_entropy of probabilities", {"label_smoothing": 0.2}, probabilities()),
    of_classes("cross_entropy of probabilities, weighted", {}, probabilities(), weighted=True),
    of_classes("cross_entropy of probabilities of pixels", NONE, probabilities(SPATIAL)),
    of_classes("cross_entropy of probabilities, sum", SUM, probabilities()),
    of_classes("nll_loss", {}, classes(), function="nll_loss"),
    of_classes(
        "nll_loss weighted, some ignored",
        {"ignore_index": -100},
        classes(SPATIAL, -100),
        weighted=True,
        function="nll_loss",
    ),
    of_classes("nll_loss none", NONE, classes(), function="nll_loss"),
    plain("mse_loss", pair()),
    plain("l1_loss", pair()),
    plain("smooth_l1_loss", pair(), {}, {"beta": 0.4, **NONE}, {"beta": 0.0, **SUM}),
    plain("huber_loss", pair(), {}, {"delta": 0.7, **NONE}, {"delta": 2.0, **SUM}),
    plain("binary_cross_entropy", pair(0.05, 0.95, (0.05, 0.95))),
    plain("binary_cross_entropy_with_logits", pair(-20, 20, (0.0, 1.0))),
    Case(
        "binary_cross_entropy_with_logits weighted",
        lambda x, y, w, p: af.binary_cross_entropy_with_logits(
            x, y, w.detach(), "mean", p.detach()
        ),
        lambda t, x, y, w, p: t.nn.functional.binary_cross_entropy_with_logits(
            x, y, w.detach(), pos_weight=p.detach()
        ),
        [
            (*floats(s, key=s), *floats(s, (s[-1],), (s[-1],), low=0.0, high=1.0, key=s))
            for s in ROWS
        ],
    ),
    plain("soft_margin_loss", [(x, np.sign(y)) for x, y in pair()], constants=1),
    plain(
        "kl_div",
        [(x, y) for x, y in pair(-9.0, -5.0, (0.01, 1.0)) if x.ndim] * 2,
        SUM,
        NONE,
        {"reduction": "batchmean"},
    ),
    plain(
        "kl_div",
        [(x, y) for x, y in pair() if x.ndim] * 2,
        {"log_target": True, "reduction": "batchmean"},
        note=" of logarithms",
    ),
    plain(
        "poisson_nll_loss",
        pair(0.1, 2.0, (0.1, 4.0)),
        {},
        {"log_input": False, "full": True, **NONE},
    ),
    Case(
        "gaussian_nll_loss",
        lambda x, y, v: [af.gaussian_nll_loss(x, y, v), af.gaussian_nll_loss(x, y, v, True, 0.5)],
        lambda t, x, y, v: [
            t.nn.functional.gaussian_nll_loss(x, y, v),
            t.nn.functional.gaussian_nll_loss(x, y, v, True, 0.5),
        ],
        [
            (*floats(s, s, key=s), *floats(v, low=0.1, high=2.0, key=s))
            for s in ROWS
            for v in (s, s[:1])
            if s[1] > 1 or v == s
        ],
    ),
    plain(
        "hinge_embedding_loss",
        [(x, np.sign(y)) for x, y in pair()],
        {},
        {"margin": 0.3, **NONE},
        constants=1,
    ),
    plain(
        "margin_ranking_loss",
        [(*floats(s, s, key=s), signs(s)) for s in ROWS],
        {},
        {"margin": 0.5, **NONE},
        constants=1,
    ),
    plain(
        "cosine_similarity",
        [
            floats((n, d), s, key=(n, d))
            for n in (2, 5)
            for d in (2, 3, 7, 9, 40)
            for s in ((n, d), (1, d))
        ],
        {},
        {"dim": 0, "eps": 2.5},
    ),
    plain("cosine_embedding_loss", vectors(1, count=2), {}, {"margin": 0.2, **NONE}, constants=1),
    plain(
        "pairwise_distance",
        vectors(count=2),
        {},
        {"p": 1.0, "keepdim": True},
        {"p": 3.0},
        {"p": float("inf")},
    ),
    *[
        Case(
            f"cdist {p}",
            lambda x, y, p=p: af.cdist(x, y, p),
            lambda t, x, y, p=p: t.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist"),
            [
                floats((*b, n, m), (*c, 3, m), key=(p, n, m))
                for b, c in (((), ()), ((2,), (2,)), ((2, 1), (3,)), ((2,), ()))
                for n, m in ((1, 1), (2, 3), (4, 2), (5, 7), (1, 9))
            ],
        )
        for p in (2.0, 1.0, 0.0, 3.0, float("inf"))
    ],
    plain(
        "triplet_margin_loss",
        vectors(),
        {},
        {"margin": 2.0, "p": 1.0, "swap": True, **NONE},
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


def traced(function, **shapes):
    job = af.job(train=False)(lambda model, batch: function(*[batch[name] for name in shapes]))
    return job.step(af.nn.Module(), {n: np.ones(s, d) for n, (s, d) in shapes.items()})


def test_logits_of_sequences_name_the_mend():
    shapes = {"x": ((2, 3, 5), "float32"), "y": ((2, 3), "int64")}
    with raises(af.CompileError):
        traced(af.cross_entropy, **shapes)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"reduction": "avg"},
        {"label_smoothing": 2.0},
        {"weight": np.ones(4, np.float32)},
        {"ignore_index": 0.5},
    ],
)
def test_wrong_options_are_told(kwargs):
    shapes = {"x": ((2, 5), "float32"), "y": ((2,), "int64")}
    with raises(af.CompileError):
        traced(lambda x, y: af.cross_entropy(x, y, **kwargs), **shapes)


def test_all_labels_ignored_have_no_mean():
    shapes = {"x": ((2, 5), "float32"), "y": ((2,), "int64")}
    loss = traced(lambda x, y: af.cross_entropy(x, y, ignore_index=1), **shapes)
    assert np.isnan(next(iter(loss.values())))
