"""Metrics by rules of a user's own, against numpy over all rows at once."""

import numpy as np
import pytest
from error_texts import raises
from rank_trainings import Training

import actorflow as af
from actorflow import nn
from actorflow.metrics.totals import RULES, columns_of
from compiler.contract.errors import PlanFormatError
from compiler.contract.statistic import Statistic

RNG = np.random.default_rng(0)
ROWS = 53
Z = (1e6 + RNG.normal(size=ROWS)).astype(np.float32)
Y = RNG.normal(size=(ROWS, 3)).astype(np.float32)
K = RNG.integers(-5, 2**40, ROWS)


@af.metrics.rule
def deviations(count, z, zz, y):
    """Return the deviation of z, and the means of y."""
    return np.array([np.sqrt(zz / count - (z / count) ** 2), *(y / count)])


@af.metrics.rule
def total(count, k):
    return k


@af.metrics.rule
def rows(count, k):
    return count


@af.metrics.rule
def share(count, k):
    return np.where(count > 0, k / count, 0.0)  # an array without axes


def outputs(model, batch):
    z = batch.z.to("float64") - 1e6
    mask = batch.counts
    return {
        "deviations": deviations(z, z * z, batch.y, mask=mask),
        "total": total(batch.k, mask=mask),
        "rows": rows(batch.k, mask=mask),
        "share": share(batch.k, mask=mask),
    }


@pytest.mark.parametrize("size", [4, 20, 53])
def test_a_rule_gets_sums_over_all_rows_that_count_and_their_number(size):
    data = af.data.from_arrays({"z": Z, "y": Y, "k": K})
    measured = af.job(outputs, train=False).evaluate(
        nn.Identity(), data.batch(size, drop_last=False, mask="counts")
    )
    want = [Z.astype(np.float64).std(), *Y.mean(0, dtype=np.float64)]
    np.testing.assert_allclose(measured["deviations"], want, rtol=1e-6)
    assert (measured["total"], measured["rows"]) == (K.sum(), ROWS)
    assert (type(measured["share"]), measured["share"]) == (float, K.sum() / ROWS)


def test_a_training_and_its_evaluation_report_it():
    def loss(model, batch):
        return {"loss": af.square(model(batch.y)).mean(), "total": total(batch.k)}

    job = af.job(loss, optimizer=af.optim.SGD(0.1), accumulate=2)
    arrays = {"y": Y, "k": K}
    watched = af.Evaluation(
        af.job(loss, train=False), af.data.ArraySource(arrays, batch=9, shuffle=False), 1, 5
    )
    data = af.data.ArraySource(arrays, batch=7, shuffle=False)
    result = job.fit(nn.Linear(3, 1), data, steps=2, evaluation=watched, progress=False)
    assert result.metrics["total"] == K[14:28].sum()
    assert result.evaluations[-1][1]["total"] == K[:45].sum()


@pytest.mark.usefixtures("native_toolchain")
@pytest.mark.no_gpu("ranks meet in memory of the host")
def test_ranks_report_it_of_all_rows():
    def fn(model, batch):
        z = model(batch.x)
        return {"loss": af.cross_entropy(z, batch.y), "total": total(batch.y, mask=batch.y > 1)}

    (alone,), ranks = [Training(fn=fn).run(mesh, 2) for mesh in (None, af.Mesh(data=2))]
    assert [row["total"] for row in alone.told] == [row["total"] for row in ranks[1].told]
    assert alone.told[0]["total"] > 0


def test_rows_that_do_not_count_have_no_part_whatever_they_are():
    with af.eager():
        z = np.array([1.0, np.nan, np.inf])
        assert total(z, mask=np.array([1, 0, 0])).compute() == 1.0
        assert np.isnan(total(z, mask=np.zeros(3)).compute())
        assert np.isnan(total(z).compute())


def test_a_rule_of_the_name_of_another_is_another():
    def make(factor):
        @af.metrics.rule
        def scaled(count, k):
            return factor * k

        return scaled

    twice, thrice = make(2), make(3)
    job = af.job(lambda model, batch: {"2": twice(batch.k), "3": thrice(batch.k)}, train=False)
    came = job.step(nn.Identity(), {"k": K})
    assert (came["2"], came["3"]) == (2 * K.sum(), 3 * K.sum())
    assert twice.__name__ == "scaled"


@pytest.mark.parametrize("function", [
    lambda count, k: {}["nothing"], lambda count, k: "text", lambda count: 0,
], ids=["raises", "text", "arguments"])  # fmt: skip
def test_what_a_rule_does_wrong_is_an_error_with_the_line_of_the_metric(function):
    wrong = af.metrics.rule(function)
    data = af.data.ArraySource({"k": K}, batch=53, epochs=1)
    job = af.job(lambda model, batch: {"wrong": wrong(batch.k)}, train=False)
    with raises(af.DataError):
        job.evaluate(nn.Identity(), data)


@pytest.mark.parametrize("call", {
    "none": total,
    "number": lambda: total(af.zeros()),
    "rows": lambda: total(af.zeros(3), af.zeros(4, 3)),
    "mask": lambda: total(af.zeros(3), mask=af.zeros(4)),
    "wide mask": lambda: total(af.zeros(3, 2), mask=af.zeros(3, 2)),
    "no function": lambda: af.metrics.rule(3),
    "class": lambda: af.metrics.rule(dict),
}.items(), ids=lambda pair: pair[0])  # fmt: skip
def test_what_a_rule_does_not_take_is_refused(call):
    with raises(af.CompileError), af.eager():
        call[1]()


def test_a_plan_whose_rule_is_not_imported_says_so():
    (name,) = [name for name in RULES if name.endswith(".total")]
    assert columns_of([Statistic(name, 0, "t").name])["t"].rule == name
    with raises(PlanFormatError):
        columns_of([Statistic("own elsewhere.total", 0, "t").name])
