"""Random numbers follow from seed, step, call and element, and are distributed as they say."""

import math

import numpy as np
import pytest
from error_texts import raises
from random_formulas import random_numbers

import actorflow as af
from actorflow import nn

N = 40_000


def drawn(function, device=None, steps=1):
    """Return what each step of a job draws."""
    job = af.job(train=False, **(device or {}))(lambda model, batch: {"y": function(batch.x)})
    model = nn.Module()
    try:
        return [job.step(model, {"x": np.ones(3, np.float32)})["y"] for _ in range(steps)]
    finally:
        job.close(model)


def distance(numbers, distribution):
    """Return the statistic of Kolmogorov and Smirnov, times the root of the number of numbers."""
    ordered = np.sort(np.asarray(numbers, np.float64).reshape(-1))
    below = np.array([distribution(x) for x in ordered])
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return max((steps[1:] - below).max(), (below - steps[:-1]).max()) * math.sqrt(len(ordered))


def test_uniform_bits_are_those_of_numpys_philox_everywhere(device):
    (got,) = drawn(lambda x: af.stack([af.rand(50, 3), af.rand(50, 3)]), device)
    for number, own in enumerate(got, 1):
        bits = np.random.Philox(key=[0, number], counter=[0, 0, 0, 0])
        np.testing.assert_array_equal(own, np.random.Generator(bits).random((50, 3), np.float32))


def philox(step, seed=0, count=5):
    """Return the first numbers of `af.rand` at a step."""
    bits = np.random.Philox(key=[seed, 1], counter=[0, 0, step, 0])
    return np.random.Generator(bits).random(count, np.float32)


def sampler(device=None, **options):
    """Return a job that does not train, and draws five numbers."""
    job_of = af.job(train=False, **(device or {}), **options)
    return job_of(lambda model, batch: {"y": af.rand(5) + batch.x[0] * 0.0})


def zeros(rows, batch=1):
    return af.data.ArraySource({"x": np.zeros(rows, np.float32)}, batch=batch)


def test_each_step_of_a_job_that_does_not_train_draws_its_own_numbers(device):
    made = drawn(lambda x: af.rand(5), device, steps=3)
    np.testing.assert_array_equal(made, [philox(step) for step in range(3)])


@pytest.mark.parametrize("seed", [0, 7])
def test_the_batches_of_a_stream_draw_what_steps_draw_and_begin_anew(device, seed):
    job, model = sampler(device, seed=seed), nn.Module()
    for _ in range(2):
        made = [out["y"] for out in job.stream(model, zeros(3), steps=3)]
        np.testing.assert_array_equal(made, [philox(step, seed) for step in range(3)])


def test_a_fit_that_does_not_train_draws_by_the_seed_of_the_run(device):
    made = []
    sampler(device).fit(
        nn.Module(), zeros(3), steps=3, seed=3, progress=False,
        on_step=lambda step, outputs: made.append(outputs["y"]),
    )  # fmt: skip
    np.testing.assert_array_equal(made, [philox(step, 3) for step in range(3)])


def test_batches_of_other_lengths_go_on_with_the_numbers_until_close():
    job, model = sampler(), nn.Module()
    made = [job.step(model, {"x": np.zeros(1 + n % 2, np.float32)})["y"] for n in range(4)]
    np.testing.assert_array_equal(made, [philox(step) for step in range(4)])
    job.close(model)
    np.testing.assert_array_equal(job.step(model, {"x": np.zeros(1, np.float32)})["y"], philox(0))


def test_a_plan_that_draws_goes_on_from_where_its_last_call_ended():
    runner = af.Runner(sampler().compile(nn.Module(), zeros(4)), seed=5)
    made = [out["y"] for _ in range(2) for out in runner.stream(zeros(4), steps=2)]
    np.testing.assert_array_equal(made, [philox(step, 5) for step in range(4)])


@pytest.mark.parametrize("kind", ["multinomial", "bernoulli", "randperm", "randn", "randint"])
def test_no_two_steps_draw_the_same(kind):
    draws = {
        "multinomial": lambda x: af.multinomial(af.full((30, 4), 0.25), 1),
        "bernoulli": lambda x: af.bernoulli(af.full((40,), 0.5)),
        "randperm": lambda x: af.randperm(30),
        "randn": lambda x: af.randn(4),
        "randint": lambda x: af.randint(0, 100, (30,)),
    }
    made = drawn(draws[kind], steps=5)
    assert len({array.tobytes() for array in made}) == 5


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"streams": 2}], ids=str)
@pytest.mark.parametrize("batches", [1, 2])
def test_each_batch_that_a_training_evaluates_draws_its_own_numbers(tmp_path, batches, options):
    look = af.job(train=False)(lambda model, batch: {"y": af.rand(5).sum() + batch.x.sum() * 0.0})

    def results(steps, checkpoint=None):
        train = af.job(optimizer=af.optim.SGD(0.1), **options)(
            lambda model, batch: af.square(model(batch.x.reshape(1, 1)) + af.rand(1)).mean()
        )
        evaluation = af.Evaluation(look, zeros(4), every=2, batches=batches)
        found = train.fit(
            nn.Linear(1, 1), zeros(32), steps=steps, evaluation=evaluation, seed=9,
            progress=False, checkpoint=checkpoint, every=3,
        )  # fmt: skip
        return [means["y"] for _, means in found.evaluations]

    sums = [philox(k, 9).sum(dtype=np.float64) for k in range(4 * batches)]
    expected = np.reshape(sums, (4, batches)).mean(1)
    np.testing.assert_allclose(results(8), expected, rtol=1e-6)
    parts = results(3, tmp_path) + results(8, tmp_path)
    np.testing.assert_allclose(parts, expected, rtol=1e-6)


def test_what_a_job_that_draws_may_not_call_a_buffer():
    class Model(nn.Module):
        def __init__(self):
            self.step = nn.Buffer((), dtype="int64")

    @af.job(train=False)
    def look(model, batch):
        return {"y": af.rand(2) + model.step.float()}

    with raises(af.CompileError):
        look.step(Model(), {"x": np.zeros(1, np.float32)})


def test_each_kind_of_number_is_distributed_as_it_says():
    def several(x):
        kinds = {"uniform": af.uniform(-1.0, 3.0, N), "normal": af.randn(N)}
        kinds["wide"] = af.normal(1.0, 2.0, N, dtype="float64").to("float32")
        kinds["integers"] = af.randint(-3, 4, N).to("float32")
        kinds["bernoulli"] = af.bernoulli(af.full((N,), 0.3))
        weights = x.reshape(1, 3) * np.array([[1, 0, 3]], np.float32)
        kinds["multinomial"] = weights.multinomial(N, True).reshape(N).to("float32")
        return af.stack(list(kinds.values()))

    (got,) = drawn(several)
    uniform, normal, wide, whole, zeros_and_ones, places = got
    assert distance(uniform, lambda x: (x + 1) / 4) < 1.95
    assert distance(normal, lambda x: math.erfc(-x / math.sqrt(2)) / 2) < 1.95
    assert distance(wide, lambda x: math.erfc(-(x - 1) / math.sqrt(8)) / 2) < 1.95
    assert {*whole} == {*range(-3, 4)}
    counts = np.bincount(whole.astype(int) + 3)
    assert ((counts - N / 7) ** 2 / (N / 7)).sum() < 22.5  # chi-squared, 6 degrees: 0.1 %
    assert {*zeros_and_ones} == {0.0, 1.0}
    assert abs(zeros_and_ones.mean() - 0.3) < 4 * math.sqrt(0.21 / N)
    assert {*places} == {0.0, 2.0}
    assert abs((places == 2).mean() - 0.75) < 4 * math.sqrt(0.1875 / N)


def test_normal_numbers_reach_into_the_tails():
    (got,) = drawn(lambda x: af.randn(2_000_000))
    for bound in (3.0, 4.0, 4.5):
        expected = got.size * math.erfc(bound / math.sqrt(2))
        assert abs((np.abs(got) > bound).sum() - expected) < 5 * math.sqrt(expected) + 1


def test_places_are_drawn_once_where_they_are_not_put_back():
    def orders(x):
        weights = x.reshape(1, 3).broadcast_to(4000, 3) * np.array([1, 2, 5], np.float32)
        return weights.multinomial(2)

    (got,) = drawn(orders)
    assert (got[:, 0] != got[:, 1]).all()
    for place, share in enumerate((0.125, 0.25, 0.625)):
        assert abs((got[:, 0] == place).mean() - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_bad_arguments_are_told():
    for function in (
        lambda x: af.randint(3, 3, 5),
        lambda x: af.rand(3, dtype="int32"),
        lambda x: x.multinomial(4),
    ):
        with raises(af.CompileError):
            drawn(function)
    with raises(af.CompileError):
        af.rand(3)


def test_steps_draw_other_numbers_and_gradients_flow_through_scales():
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        noise = af.randn(4, 3)
        return {"loss": af.square(model(batch.x) + noise).mean(), "noise": noise.sum()}

    model = nn.Linear(3, 3)
    data = {"x": np.ones((4, 3), np.float32)}
    try:
        made = [train.step(model, data) for _ in range(2)]
    finally:
        train.close(model)
    assert made[0]["noise"] != made[1]["noise"]


def numbers_at(seeds, places):
    """Return numpy's numbers of 48 bits at the places of streams."""
    numbers = []
    for seed, place in zip(seeds.reshape(-1), places.reshape(-1), strict=True):
        counter = [int(seed) % 2**31 * 2**29 + int(place) % 2**29, 0, 0, 0]
        word = int(np.random.Philox(key=[0, 0], counter=counter).random_raw(1)[0])
        high, low = word % 2**32 >> 8, word >> 40
        numbers.append((high + low * 2.0**-24) * 2.0**-24)
    return np.reshape(numbers, seeds.shape)


def test_numbers_of_seeds_and_places_are_numpys_whatever_else_is_drawn(device):
    seeds, places = np.array([[0, 7, 2**31 - 1], [5, 5, -1]]), np.array([[0, 9, 2**29 - 1]] * 2)
    for more in (lambda: 0.0, lambda: af.rand(7).sum() * 0.0):
        first, second = drawn(lambda x, m=more: m() + af.rand_at(seeds, places), device, steps=2)
        np.testing.assert_array_equal(first, numbers_at(seeds, places))
        np.testing.assert_array_equal(second, first)


def test_numbers_of_neighbouring_seeds_and_places_are_uniform_and_unlike():
    seeds, places = np.divmod(np.arange(N), 200)
    (numbers,) = drawn(lambda x: af.rand_at(seeds, places))
    assert distance(numbers, lambda x: x) < 1.63  # of 1 %
    pairs = np.histogram2d(numbers[:-1], numbers[1:], bins=10)[0]
    assert ((pairs - N / 100) ** 2 / (N / 100)).sum() < 148  # chi-square, 99 degrees, 0.1 %


@pytest.mark.parametrize("places", [np.zeros(2, np.int64), np.zeros(3, np.float32)])
def test_seeds_need_a_place_each(places):
    with raises(af.CompileError):
        drawn(lambda x: af.rand_at(np.zeros(3, np.int64), places))


def loop_philox(step, iterations, keys, count=5, seed=0):
    """Return the numbers of each iteration of a loop, whose seed has the keys before its draw."""
    (high, low), draw = [random_numbers(seed, step, 1, key)[0] for key in keys[:2]], keys[2]
    own = int(high) * 2**24 + int(low)
    return [random_numbers(own, i, count, draw) / 2**24 for i in range(iterations)]


def scanned(x):
    return af.scan(lambda c, _: (c, af.rand(5)), x, None, 4, reverse=True)[1]


def test_each_iteration_of_a_scan_draws_its_own_numbers_in_each_step(device):
    made = drawn(scanned, device, steps=2)
    # The draw takes its key after the loop has taken those of its seed.
    expected = [loop_philox(step, 4, (1, 2, 3)) for step in range(2)]
    np.testing.assert_array_equal(made, np.float32(expected))


def test_loops_within_loops_draw_their_own_numbers():
    def nested(x):
        return af.scan(lambda c, _: (c, scanned(c)), x, None, 3)[1]

    made = np.stack(drawn(nested, steps=2)).reshape(-1)
    assert len({*made.tolist()}) == made.size == 2 * 3 * 4 * 5


@pytest.mark.parametrize("options", [{}, {"max_steps": 5}], ids=["endless", "bounded"])
def test_each_turn_of_a_while_draws_its_own_numbers(options):
    def turns(x):
        def turn(held):
            n, rows = held
            return n + 1, af.concat([rows[1:], af.rand(1, 5)])

        start = (np.int64(0), np.zeros((4, 5), np.float32))
        return af.while_loop(lambda held: held[0] < 4, turn, start, **options)[1]

    made = np.stack(drawn(turns, steps=2)).reshape(-1)
    assert len({*made.tolist()}) == made.size
    if not options:
        expected = [loop_philox(step, 4, (1, 2, 3)) for step in range(2)]
        np.testing.assert_array_equal(made, np.float32(expected).reshape(-1))


def test_a_condition_may_draw_though_the_function_does_not():
    def turns(x):
        return af.while_loop(lambda v: af.rand(()) + 0.0 * v < 0.9, lambda v: v + 1.0, x.sum())

    made = [float(y) for y in drawn(turns, steps=6)]
    for step, count in enumerate(made):
        numbers = np.concatenate(loop_philox(step, 200, (1, 2, 3), count=1))
        assert count == 3.0 + int(np.argmax(numbers >= np.float32(0.9)))


def test_a_branch_draws_what_a_loop_or_step_does():
    def branch(x):
        return af.cond(x.sum() > 0.0, lambda: af.rand(5), lambda: af.rand(5) + 2.0)

    made = drawn(branch, steps=2)
    np.testing.assert_array_equal(made, [philox(step) for step in range(2)])


def dropped_in_a_scan(recompute, x):
    """Return what a scan with dropout makes of x in two steps, and its gradients."""

    def loss(model, batch):
        def step(held, entry):
            held = af.dropout(held * 0.5 + entry, 0.4)
            return held, held

        ys = af.scan(step, batch.x[0], batch.x, recompute=recompute)[1]
        return {"loss": model.one.sum(), "y": ys, "grad": af.grad(ys.sum(), batch.x)}

    model = nn.Module()
    model.one = nn.Parameter((1,), "ones")
    job = af.job(loss, optimizer=af.optim.SGD(0.0), seed=3)
    return [job.step(model, {"x": x}) for _ in range(2)]


def test_the_gradient_of_dropout_in_a_scan_has_the_mask_of_each_iteration():
    x = np.abs(np.random.default_rng(0).standard_normal((4, 6))).astype(np.float32) + 0.1
    made = dropped_in_a_scan(False, x)
    for step, own in enumerate(made):
        numbers = np.float32(loop_philox(step, 4, (2, 3, 1), 6, seed=3))
        factors = np.where(numbers >= np.float32(0.4), np.float32(1 / 0.6), 0)
        held, flow, grad = x[0], np.zeros(6), np.zeros_like(x)
        for t in range(4):
            held = (held * 0.5 + x[t]) * factors[t]
            np.testing.assert_allclose(own["y"][t], held, rtol=1e-6)
        for t in range(4)[::-1]:
            flow = (1.0 + flow) * factors[t]
            grad[t] += flow
            flow = flow * 0.5
        grad[0] += flow
        np.testing.assert_allclose(own["grad"], grad, rtol=1e-5)
    for one, other in zip(made, dropped_in_a_scan(True, x), strict=True):
        for name in ("y", "grad"):
            np.testing.assert_array_equal(one[name], other[name])


def test_an_eager_loop_draws_the_numbers_of_a_job():
    (expected,) = drawn(scanned)
    made = af.eager(lambda model, batch: scanned(batch.x))(nn.Module(), {"x": np.ones(3, "f4")})
    np.testing.assert_array_equal(made.numpy(), expected)
