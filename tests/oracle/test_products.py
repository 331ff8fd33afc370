"""Products of vectors, matrices and batches of them, and Einstein's convention."""

import numpy as np
import pytest
from error_texts import raises
from oracle import Case, floats

import actorflow as af
from actorflow import nn

EXTENTS = [(b, m, k, n) for b in (1, 2, 3) for m in (1, 4) for k in (1, 3) for n in (1, 5)]


def sets(*terms):
    """Return argument sets of tensors with these axes, letters of b, m, k and n."""
    found = [dict(zip("bmkn", extents, strict=True)) for extents in EXTENTS]
    found += [{"b": 2, "m": 0, "k": 3, "n": 2}, {"b": 2, "m": 3, "k": 0, "n": 2}]
    return [
        floats(*[tuple(e[c] if c != "1" else 1 for c in term) for term in terms], key=i)
        for i, e in enumerate(found)
    ]


def case(name, call, *terms):
    return Case(name, lambda *args: call(af, *args), call, sets(*terms))


EQUATIONS = {
    "mk,kn->mn": ("mk", "kn"),
    "bmk,bkn->bmn": ("bmk", "bkn"),
    "mk,kn": ("mk", "kn"),
    "mk,nk->nm": ("mk", "nk"),
    "bmk,kn->nbm": ("bmk", "kn"),
    "m,n->mn": ("m", "n"),
    "bmn->nb": ("bmn",),
    "mm->m": ("mm",),
    "mm": ("mm",),
    "bmk,mk->b": ("bmk", "mk"),
    "bm,bm->bm": ("bm", "bm"),
    "mk,kn,nb->bm": ("mk", "kn", "nb"),
    "bmk,bnk,b->mn": ("bmk", "bnk", "b"),
    "bm,kn->": ("bm", "kn"),
    "...k,kn->...n": ("bmk", "kn"),
    "...mk,...kn": ("bmk", "kn"),
    "b...,...k->...b": ("bmk", "1k"),
    "...m->m": ("bkm",),
    "m...m->...m": ("mbm",),
}

CASES = [
    case("vector @ vector", lambda t, a, b: t.matmul(a, b), "k", "k"),
    case("vector @ matrix", lambda t, a, b: a @ b, "k", "kn"),
    case("matrix @ vector", lambda t, a, b: a @ b, "mk", "k"),
    case("batch @ vector", lambda t, a, b: a @ b, "bmk", "k"),
    case("vector @ batch", lambda t, a, b: a @ b, "k", "bkn"),
    case("broadcast batches", lambda t, a, b: a @ b, "b1mk", "nkm"),
    case("dot", lambda t, a, b: t.dot(a, b), "k", "k"),
    case("outer", lambda t, a, b: t.outer(a, b), "m", "n"),
    case("mv", lambda t, a, b: t.mv(a, b), "mk", "k"),
    case("mm", lambda t, a, b: t.mm(a, b), "mk", "kn"),
    case("bmm", lambda t, a, b: t.bmm(a, b), "bmk", "bkn"),
    case("addmm", lambda t, x, a, b: t.addmm(x, a, b, beta=0.5, alpha=2.0), "mn", "mk", "kn"),
    case("baddbmm", lambda t, x, a, b: t.baddbmm(x, a, b), "bmn", "bmk", "bkn"),
    case("tensordot", lambda t, a, b: t.tensordot(a, b, 1), "bmk", "kn"),
    case("tensordot of axes", lambda t, a, b: t.tensordot(a, b, ([0, 2], [1, 0])), "bmk", "kbn"),
    Case(
        "cross",
        lambda a, b: [af.cross(a, b, -1), af.cross(a, b, 0)],
        lambda t, a, b: [t.linalg.cross(a, b), t.linalg.cross(a, b, dim=0)],
        [floats((3, n, 3), (3, n, 3), key=n) for n in range(20)],
    ),
    Case(
        "cross along the first axis of extent 3",
        af.cross,
        lambda t, a, b: t.linalg.cross(a, b, dim=next(i for i in (0, 1, 2) if a.shape[i] == 3)),
        [floats(*[(2 + n % 3, 3, 1 + n % 4)] * 2, key=n) for n in range(20)],
    ),
    *[
        Case(
            f"einsum {text}",
            lambda *args, text=text: af.einsum(text, *args),
            lambda t, *args, text=text: t.einsum(text, *args),
            sets(*terms),
        )
        for text, terms in EQUATIONS.items()
    ],
]


def test_a_case_agrees_with_torch(case, dtype, agrees):
    agrees(case, dtype)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: af.einsum("...i...->i", x),
        lambda x: af.einsum("...ijk->i", x),
        lambda x: af.einsum("ij->...i", x),
        lambda x: af.einsum("ij,jk", x),
        lambda x: af.einsum("ij->k", x),
        lambda x: af.einsum("ijk->i", x),
        lambda x: af.einsum("ii->i", x),
        lambda x: af.mv(x, x),
        lambda x: x @ 2.0,
        lambda x: af.tensordot(x, x, 2.5),
        lambda x: af.tensordot(x, x, ([0], [1])),
    ],
)
def test_a_product_that_is_none_says_what_came(call):
    job = af.job(train=False)(lambda model, batch: call(batch["x"]))
    with raises(af.CompileError):
        job.step(nn.Module(), {"x": np.ones((2, 3), np.float32)})
