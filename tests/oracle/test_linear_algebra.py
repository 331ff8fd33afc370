"""Decompositions of matrices and Fourier transforms."""

import numpy as np
import pytest
from error_texts import raises
from oracle import Case, floats, seeded

import actorflow as af

SQUARE = (
    *(
        (1, 1),
        (2, 2),
        (3, 3),
        (5, 5),
        (8, 8),
        (17, 17),
        (2, 3, 3),
        (3, 1, 4, 4),
        (2, 0, 0),
        (0, 2, 2),
    ),
    *(
        (4, 4),
        (6, 6),
        (2, 5, 5),
        (2, 2, 2),
        (7, 7),
        (3, 2, 2),
        (9, 9),
        (1, 3, 3),
        (2, 6, 6),
        (12, 12),
    ),
)
TALL = (
    *((3, 2), (2, 3), (4, 4), (1, 5), (5, 1), (2, 4, 3), (2, 3, 4), (7, 5), (5, 7), (3, 3)),
    *((8, 2), (2, 8), (6, 4), (1, 1), (2, 2, 3, 2), (9, 3), (3, 9), (2, 2), (10, 10), (4, 6)),
)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16)
NO_GPU = "LAPACK and pocketfft are of the host"


def conditioned(shape, key):
    """Return matrices whose singular values are apart from each other and from 0."""
    rng, k = seeded("matrix", shape, key), min(shape[-2:])
    u = np.linalg.qr(rng.normal(size=(*shape[:-2], shape[-2], k)))[0]
    v = np.linalg.qr(rng.normal(size=(*shape[:-2], shape[-1], k)))[0]
    s = 1.0 + 0.5 * np.arange(k)[::-1] + rng.uniform(0, 0.1, k)
    return (u * s) @ v.swapaxes(-1, -2)


def positive(shape, key):
    x = conditioned(shape, key)
    return x @ x.swapaxes(-1, -2) + np.eye(shape[-1])


def pairs(key):
    """Return sets of complex numbers as pairs, [..., n, 2]."""
    shapes = [(n, 2) for n in LENGTHS] + [(3, n, 2) for n in LENGTHS]
    return [floats(shape, key=(key, shape)) for shape in shapes]


MATRICES = [(conditioned(s, n),) for n, s in enumerate(SQUARE)]
RECTANGLES = [(conditioned(s, n),) for n, s in enumerate(TALL)]
POSITIVE = [(positive(s, n),) for n, s in enumerate(SQUARE)]
SYSTEMS = [(conditioned(s, n), *floats((*s[:-1], 1 + n % 3), key=n)) for n, s in enumerate(SQUARE)]
VECTORS = [(conditioned(s, n), *floats(s[:-1], key=n)) for n, s in enumerate(SQUARE)]
REAL = [(x[..., 0],) for (x,) in pairs("real")]
IMAGES = [floats((2, n, m), key=(n, m)) for n in (1, 2, 3, 5) for m in (2, 3, 4, 5, 8)]


def parts(t, x):
    return t.view_as_real(x)


def whole(t, x):
    return t.view_as_complex(x.contiguous())


def even_spectra():
    return [(x[0][..., : x[0].shape[-2], :],) for x in pairs("half") if x[0].shape[-2] > 1] + [
        floats((4, n, 2), key=n) for n in (3, 5)
    ]


CASES = [
    Case("det", lambda x: af.linalg.det(x), lambda t, x: t.linalg.det(x), MATRICES, no_gpu=NO_GPU),
    Case(
        "slogdet",
        lambda x: list(af.linalg.slogdet(x)),
        lambda t, x: list(t.linalg.slogdet(x)),
        MATRICES,
        no_gpu=NO_GPU,
    ),
    Case("inv", lambda x: af.linalg.inv(x), lambda t, x: t.linalg.inv(x), MATRICES, no_gpu=NO_GPU),
    Case("solve", af.linalg.solve, lambda t, a, b: t.linalg.solve(a, b), SYSTEMS, no_gpu=NO_GPU),
    Case(
        "solve of vectors and from the right",
        lambda a, b: [af.linalg.solve(a, b), af.linalg.solve(a, b.unsqueeze(-2), left=False)],
        lambda t, a, b: [
            t.linalg.solve(a, b.unsqueeze(-1)).squeeze(-1),
            t.linalg.solve(a, b.unsqueeze(-2), left=False),
        ],
        VECTORS,
        no_gpu=NO_GPU,
    ),
    Case(
        "cholesky",
        lambda x: [af.linalg.cholesky(x), af.linalg.cholesky(x, upper=True)],
        lambda t, x: [t.linalg.cholesky(x), t.linalg.cholesky(x, upper=True)],
        POSITIVE,
        no_gpu=NO_GPU,
    ),
    # Of vectors that belong to a value only squares are defined: their signs are free.
    Case(
        "eigh",
        lambda x: [(w := af.linalg.eigh(x))[0], af.square(w[1])],
        lambda t, x: [(w := t.linalg.eigh(x))[0], w[1].square()],
        POSITIVE,
        no_gpu=NO_GPU,
    ),
    Case(
        "svd",
        lambda x: [(r := af.linalg.svd(x))[1], af.square(r[0]), af.square(r[2])],
        lambda t, x: [
            (r := t.linalg.svd(x, full_matrices=False))[1],
            r[0].square(),
            r[2].square(),
        ],
        RECTANGLES,
        no_gpu=NO_GPU,
    ),
    Case(
        "qr",
        lambda x: [af.square(part) for part in af.linalg.qr(x)],
        lambda t, x: [part.square() for part in t.linalg.qr(x)],
        RECTANGLES,
        no_gpu=NO_GPU,
    ),
    Case(
        "pinv",
        lambda x: af.linalg.pinv(x),
        lambda t, x: t.linalg.pinv(x),
        RECTANGLES,
        no_gpu=NO_GPU,
    ),
    Case(
        "matrix_norm",
        lambda x: (
            [af.linalg.matrix_norm(x, p) for p in ("fro", "nuc", 2, -2, 1, -1)]
            + [af.linalg.matrix_norm(x, float("inf"), keepdim=True)]
        ),
        lambda t, x: (
            [t.linalg.matrix_norm(x, p) for p in ("fro", "nuc", 2, -2, 1, -1)]
            + [t.linalg.matrix_norm(x, float("inf"), keepdim=True)]
        ),
        RECTANGLES,
        no_gpu=NO_GPU,
    ),
    Case(
        "matrix_power",
        lambda x: [af.linalg.matrix_power(x, n) for n in (0, 1, 3, -2)],
        lambda t, x: [t.linalg.matrix_power(x, n) for n in (0, 1, 3, -2)],
        MATRICES,
        no_gpu=NO_GPU,
    ),
    Case(
        "fft and ifft",
        lambda x: [af.fft.fft(x), af.fft.ifft(x), af.fft.fft(x, 5, norm="ortho")],
        lambda t, x: [
            parts(t, t.fft.fft(whole(t, x))),
            parts(t, t.fft.ifft(whole(t, x))),
            parts(t, t.fft.fft(whole(t, x), 5, norm="ortho")),
        ],
        pairs("fft"),
        no_gpu=NO_GPU,
    ),
    Case(
        "rfft",
        lambda x: [af.fft.rfft(x), af.fft.rfft(x, 6, norm="forward"), af.fft.rfft(x, dim=0)],
        lambda t, x: [
            parts(t, t.fft.rfft(x)),
            parts(t, t.fft.rfft(x, 6, norm="forward")),
            parts(t, t.fft.rfft(x, dim=0)),
        ],
        REAL,
        no_gpu=NO_GPU,
    ),
    Case(
        "irfft",
        lambda x: [af.fft.irfft(x), af.fft.irfft(x, 5), af.fft.irfft(x, 8, norm="ortho")],
        lambda t, x: [
            t.fft.irfft(whole(t, x)),
            t.fft.irfft(whole(t, x), 5),
            t.fft.irfft(whole(t, x), 8, norm="ortho"),
        ],
        even_spectra(),
        no_gpu=NO_GPU,
    ),
    Case(
        "transforms of images",
        lambda x: [
            y := af.fft.rfft2(x),
            af.fft.irfft2(y, x.shape[-2:]),
            af.fft.ifft2(af.fft.fft2(y)),
            af.fft.fftshift(x),
            af.fft.ifftshift(x, -1),
        ],
        lambda t, x: [
            parts(t, y := t.fft.rfft2(x)),
            t.fft.irfft2(y, x.shape[-2:]),
            parts(t, t.fft.ifft2(t.fft.fft2(y))),
            t.fft.fftshift(x),
            t.fft.ifftshift(x, -1),
        ],
        IMAGES,
        no_gpu=NO_GPU,
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


def computed(function, **batch):
    job = af.job(train=False)(lambda model, batch: {"y": function(batch)})
    model = af.nn.Module()
    try:
        return job.step(model, batch)["y"]
    finally:
        job.close(model)


def test_a_singular_matrix_has_a_gradient_of_its_determinant():
    x = np.array([[1.0, 2.0], [2.0, 4.0]], np.float32)
    slope = computed(lambda b: af.grad(af.linalg.det(b.x), b.x), x=x)
    np.testing.assert_allclose(slope, [[4, -2], [-2, 1]], atol=1e-5)


@pytest.mark.parametrize(
    ("function", "array"),
    [(af.linalg.inv, [[1.0, 2.0], [2.0, 4.0]]), (af.linalg.cholesky, [[1.0, 2.0], [2.0, 1.0]])],
    ids=["singular", "indefinite"],
)
def test_a_matrix_that_has_no_decomposition_fails_the_step(function, array):
    with raises(af.ActorFailed) as failed:
        computed(lambda b: function(b.x), x=np.array(array, np.float32))
    assert isinstance(failed.value.__cause__, np.linalg.LinAlgError)


@pytest.mark.parametrize(
    "function",
    [
        lambda b: af.linalg.det(b.x),
        lambda b: af.linalg.qr(b.n),
        lambda b: af.linalg.svd(b.x, full_matrices=True)[0],
        lambda b: af.linalg.solve(b.x @ b.x.T, b.x.T),
        lambda b: af.linalg.solve(b.x @ b.x.T, b.x[0, :2], left=False),
        lambda b: af.linalg.matrix_norm(b.x, "max"),
        lambda b: af.fft.fft(b.x),
        lambda b: af.fft.rfft(b.x, dim=2),
        lambda b: af.fft.rfft(b.x, 0),
        lambda b: af.fft.rfft(b.x, norm="orthogonal"),
        lambda b: af.fft.fft2(af.fft.rfft(b.x), (2,)),
    ],
    ids=[
        "square",
        "integers",
        "full",
        "sides",
        "vector",
        "norm",
        "real",
        "axis",
        "length",
        "factor",
        "lengths",
    ],
)
def test_what_cannot_be_decomposed_or_transformed_is_refused(function):
    with raises(af.CompileError):
        computed(function, x=np.ones((2, 3), np.float32), n=np.ones((2, 2), np.int64))
