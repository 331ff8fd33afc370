"""Jobs in stages, each a rank that runs its plan, against one rank that runs all."""

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT
from rank_threads import RankThreads
from staged_plans import ROWS, Layers, squares, staged_plans

import actorflow as af
from actorflow import nn
from actorflow.compile.hardware import hardware_for
from actorflow.distributed.process_group import ProcessGroup
from compiler.contract.placement import HOST
from compiler.contract.types import DType, TensorType

WORDS = {name: TensorType(DType.INT32, (4, 8)) for name in ("x", "y")}
STEPS = 3


class StagedGPT(GPT):
    """A block on each stage; embeddings are on the first one, what they make goes to the last."""

    def __call__(self, x):
        with af.stage(0):
            first = h = self.emb(x) + self.pos.weight
        for number, block in enumerate(self.blocks):
            with af.stage(number):
                h = block(h)
        return self.head(self.norm(h + first))


def words(model, batch):
    return {"loss": af.cross_entropy(model(batch.x).reshape(-1, 16), batch.y.reshape(-1))}


def gpt(layers):
    return StagedGPT(16, seq=8, width=16, layers=layers, dropout=0.1)


def shared(layers):
    """A block whose heads and hidden columns ranks share, on each stage."""
    model = StagedGPT(16, seq=8, width=24, layers=0, heads=3, dropout=0.1)
    words = {"model": af.split(0)}
    for _ in range(layers):
        model.blocks.append(nn.TransformerBlock(24, heads=3, dropout=0.1, causal=True, sbp=words))
    return model


class ViewLayers(Layers):
    """Hands on views of what each stage makes: some of the columns, and rows as columns."""

    def __call__(self, x):
        first = super().__call__(x)
        with af.stage(0):
            wide = af.concat([x * 2.0, x], -1)
            h, turned = wide[:, 2:], wide.transpose(0, 1)
        with af.stage(1):
            return first + h.mean() + turned[1:].mean()


def drawn(spec, every):
    """Return the batches of some steps."""
    rng, steps = np.random.default_rng(0), []
    for _ in range(STEPS):
        batches = []
        for _ in range(every):
            whole = {n: rng.integers(0, 16, t.shape) for n, t in spec.items()}
            real = {n: rng.normal(size=t.shape) for n, t in spec.items()}
            pairs = [(n, whole[n] if t.dtype.is_integer else real[n], t) for n, t in spec.items()]
            batches.append({n: array.astype(t.dtype.value) for n, array, t in pairs})
        steps.append(batches)
    return steps


def trained(plan, steps, every, **group):
    """Return what is told of each step, and the variables that the plan has."""
    runner, told = af.Runner(plan, **group), []
    wanted = {field.name for field in plan.fields}
    try:
        for batches in steps:
            own = [{n: a for n, a in batch.items() if n in wanted} for batch in batches]
            metrics = runner.step(own if every > 1 else own[0])
            told.append({name: np.array(array) for name, array in metrics.items()})
        return told, {name: np.array(array) for name, array in runner.variables().items()}
    finally:
        runner.close()


JOBS = {
    # Not AdamW, which makes a gradient that is 0 but for rounding as large as any.
    "gpt": (gpt, words, WORDS, {"optimizer": af.optim.SGD(0.1), "clip_norm": 0.5}),
    "shared": (shared, words, WORDS, {}),
    "layers": (lambda n: Layers(n, is_rich=True), squares, ROWS, {}),
    "views": (ViewLayers, squares, ROWS, {}),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    ("name", "num_stages"), [("gpt", 2), ("gpt", 3), ("layers", 2), ("layers", 3), ("views", 2)]
)
def test_stages_on_ranks_train_as_one_rank_does(native_toolchain, name, num_stages, every):
    model, fn, spec, options = JOBS[name]
    hardware, steps = hardware_for((HOST,)), drawn(spec, every)
    how = {"hardware": hardware, "spec": spec, "fn": fn, **options}
    (alone,) = staged_plans(model(num_stages), 1, every, **how)
    want = trained(alone, steps, every)
    plans = staged_plans(model(num_stages), num_stages, every, **how)
    threads = RankThreads(num_stages)

    def run(rank):
        return trained(plans[rank], steps, every, group=ProcessGroup(rank, threads.gather(rank)))

    found = threads.run(run)
    held = set()
    for told, variables in found:
        for mine, its in zip(told, want[0], strict=True):
            assert mine.keys() == its.keys()
            for key, value in mine.items():
                np.testing.assert_allclose(value, its[key], rtol=1e-4, err_msg=key)
        for key, array in variables.items():
            np.testing.assert_allclose(array, want[1][key], rtol=1e-3, atol=1e-5, err_msg=key)
        held |= {*variables}
    assert held == {*want[1]}


MESHES = [{"data": 2, "stage": 2}, {"stage": 3}, {"stage": 2, "model": 2}]
CASES = [("gpt", 4, mesh, {}) for mesh in MESHES]
CASES += [("shared", 2, {"stage": 2, "model": 3}, {})]
CASES += [("layers", 3, MESHES[0], {}), ("layers", 2, MESHES[0], {"zero": True})]


@pytest.mark.thinned(16)
@pytest.mark.parametrize(("name", "every", "mesh", "asked"), CASES, ids=str)
def test_a_job_on_a_mesh_with_stages_trains_as_one_rank_does(
    native_toolchain, name, every, mesh, asked
):
    model, fn, spec, options = JOBS[name]
    given = {"optimizer": af.optim.SGD(0.1, momentum=0.9), "accumulate": every, **options}
    steps, count = drawn(spec, every), mesh["stage"]
    want = trained(af.job(fn, **given).compile(model(count), spec), steps, every)
    job = af.job(fn, mesh=af.Mesh(**mesh), **given, **asked)
    num_ranks = job.mesh.num_ranks
    plans = [job.compile(model(count), spec, rank=rank) for rank in range(num_ranks)]
    threads = RankThreads(num_ranks)

    def run(rank):
        return trained(plans[rank], steps, every, group=ProcessGroup(rank, threads.gather(rank)))

    for told, variables in threads.run(run):
        for mine, its in zip(told, want[0], strict=True):
            for key, value in mine.items():
                np.testing.assert_allclose(value, its[key], rtol=1e-3, err_msg=key)
        for key, array in variables.items():
            np.testing.assert_allclose(array, want[1][key], rtol=1e-2, atol=1e-4, err_msg=key)


def test_a_job_is_refused_whose_stages_are_not_those_of_its_mesh():
    model, fn, spec, _ = JOBS["gpt"]
    job = af.job(fn, mesh=af.Mesh(stage=3), optimizer=af.optim.SGD(0.1))
    with raises(af.CompileError):
        job.compile(model(2), spec)


class CountsTwice(Layers):
    """Both stages assign one buffer, which one rank stores."""

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = nn.Buffer(())

    def __call__(self, x):
        with af.stage(0):
            self.seen.assign(self.seen + x.mean())
        y = super().__call__(x)
        with af.stage(1):
            self.seen.assign(self.seen + y.mean())
        return y


@pytest.mark.parametrize("rank", [0, 1])
def test_a_buffer_that_two_stages_assign_is_refused_with_both_lines(rank):
    job = af.job(squares, optimizer=af.optim.SGD(0.1), mesh=af.Mesh(stage=2))
    with raises(af.CompileError):
        job.compile(CountsTwice(2), ROWS, rank=rank)
