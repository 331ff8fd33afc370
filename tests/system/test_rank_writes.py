"""Reads and writes of a model that ranks train: at one step of all ranks, or refused."""

import functools
import re
from contextlib import closing

import numpy as np
import pytest
from launched_threads import launched, on_ranks

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError, PeerFailed

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 8)).astype(np.float32)
Y = X[:, :4].argmax(1).astype(np.int32)
MESHES = {
    "data": {"mesh": af.Mesh(data=2, model=1)},
    "zero": {"mesh": af.Mesh(data=2, model=1), "zero": True},
    "model": {"mesh": af.Mesh(model=2)},
    "stage": {"mesh": af.Mesh(stage=2, model=1)},
}


class Net(nn.Module):
    """A buffer on the first stage, a scale without axes on the last one."""

    def __init__(self):
        self.up, self.norm = nn.Linear(8, 16, sbp={"model": af.split(0)}), nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 4, sbp={"model": af.split(1)})
        self.scale = nn.Parameter((), (("kind", "ones"),))

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.norm(self.up(x)))
        with af.stage(1):
            return self.down(h) * self.scale


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@functools.cache
def jobs_of(kind, rank):
    """Return a job that trains and one that evaluates; each rank has its own, as a process has."""
    options = {"optimizer": af.optim.SGD(0.1, momentum=0.9), **MESHES.get(kind, {})}
    mesh = options.get("mesh")
    return af.job(loss, **options), af.job(loss, train=False, mesh=mesh)


def batch_of(number):
    rows = slice(12 * (number % 8), 12 * (number % 8) + 12)
    return {"x": X[rows], "y": Y[rows]}


def data():
    return af.data.ArraySource({"x": X, "y": Y}, batch=12, seed=3)


STORED = ("up.weight", "down.bias", "scale", "norm.running_mean", "down.weight")


class Script:
    """What a user's script does on one rank; `seen` is all that it read."""

    def __init__(self, kind, rank=0):
        self.train, self.score = jobs_of(kind, rank)
        self.model, self.rank, self.number, self.seen = Net(), rank, 0, []

    def step(self):
        self.number += 1
        self.seen.append(self.train.step(self.model, batch_of(self.number))["loss"])

    def write(self, name, value):
        stored = dict(self.model.named_stored())[name]
        stored.data = np.full(stored.type.shape, value, np.float32)

    def load(self, value):
        stored = dict(self.model.named_stored())
        dtypes = {name: s.type.dtype.value for name, s in stored.items()}
        self.model.load({n: np.full(s.type.shape, value, dtypes[n]) for n, s in stored.items()})

    def read(self):
        self.seen += [
            float(np.abs(a.astype(np.float64)).sum()) for a in self.model.state().values()
        ]

    def evaluate(self):
        self.seen.append(self.score.step(self.model, batch_of(0))["output"])

    def fit(self, within=None):
        on_step = None if within is None else lambda step, _: step == 2 and within()
        self.train.fit(self.model, data(), steps=3, progress=False, on_step=on_step)

    def stream(self, within=None):
        # An iterator that an error leaves open would be closed by the collector.
        with closing(self.train.stream(self.model, data(), steps=3)) as run:
            for step, outputs in enumerate(run, start=1):
                self.seen.append(outputs["loss"])
                if step == 2 and within is not None:
                    within()

    def state(self):
        self.train.close(self.model)
        return {name: array.tobytes() for name, array in self.model.state().items()}


def run(kind, program):
    """Return what program(script) leaves on both ranks: (seen, state), or an error."""

    def one(rank):
        script = Script(kind, rank)
        program(script)
        state = script.state()
        return script.seen, state

    return on_ranks(2, one)


def alone(program):
    script = Script("alone")
    program(script)
    return script.seen


@pytest.fixture(autouse=True)
def among_ranks(monkeypatch):
    with launched(monkeypatch):
        yield


WITHIN = {
    "write": lambda script: script.write("up.weight", 0.1),
    "write of a buffer": lambda script: script.write("norm.running_mean", 0.5),
    "write of a scalar": lambda script: script.write("scale", 0.5),
    "load": lambda script: script.load(0.1),
    "read": lambda script: script.read(),
    "evaluation": lambda script: script.evaluate(),
}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("call", ["fit", "stream"])
@pytest.mark.parametrize("kind", MESHES)
def test_a_run_that_goes_on_refuses_reads_and_writes(kind, call, within):
    def program(script):
        script.step()
        getattr(script, call)(lambda: WITHIN[within](script))

    for end in run(kind, program):
        assert isinstance(end, CompileError | PeerFailed), end
        assert "which may be at different steps" in str(end)
        assert "test_rank_writes.py:" in str(end)


APART = {
    "write": lambda script, value: script.write("up.weight", value),
    "write of the other stage": lambda script, value: script.write("down.bias", value),
    "write of a buffer": lambda script, value: script.write("norm.running_mean", value),
    "write of a scalar": lambda script, value: script.write("scale", value),
    "load": lambda script, value: script.load(value),
}


# After a read the model has its values again, until the next call takes them over.
AROUND = {
    "then a step": ([], "step"),
    "then a run": ([], "fit"),
    "then a read": ([], "read"),
    "then the end": ([], "state"),
    "after a read, then a step": (["read"], "step"),
    "after a read, then a run": (["read"], "stream"),
    "after an evaluation, then another": (["evaluate"], "evaluate"),
}


@pytest.mark.thinned(11)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("kind", MESHES)
def test_what_ranks_write_apart_is_refused(kind, apart, is_alone, around):
    before, then = AROUND[around]

    def program(script):
        for call in ["step", *before]:
            getattr(script, call)()
        if not is_alone or script.rank:
            APART[apart](script, 0.1 * (1 + script.rank))
        getattr(script, then)()

    for end in run(kind, program):
        assert isinstance(end, CompileError | PeerFailed), end
        assert "test_rank_writes.py:" in str(end)
        assert re.search("wrote|begins on rank 1 with", str(end)), end


def program_of(seed):
    """Return a random program that all ranks run, and whether one of two ranks does otherwise."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(rng.integers(3, 7)):
        kind = rng.choice(["step", "write", "load", "read", "evaluate", "fit", "stream"])
        value, name = float(rng.uniform(0.05, 0.2)), str(rng.choice(STORED))
        who = rng.choice(["all", "one", "apart"], p=[0.8, 0.1, 0.1])
        within = str(rng.choice(["nothing", *WITHIN], p=[0.7, *[0.05] * 6]))
        rows.append((str(kind), value, name, str(who), within))

    def program(script):
        script.step()
        script.read()
        for kind, value, name, who, within in rows:
            apart = value * (1 + script.rank) if who == "apart" else value
            if kind in ("write", "load") and (who != "one" or script.rank):
                args = (name, apart) if kind == "write" else (value,)
                getattr(script, kind)(*args)
            elif kind in ("fit", "stream"):
                inner = None if within == "nothing" else (lambda w=within: WITHIN[w](script))
                getattr(script, kind)(inner)
            elif kind in ("step", "read", "evaluate"):
                getattr(script, kind)()
        script.step()

    return program, rows


@pytest.mark.parametrize("seeds", range(0, 200, 4))
def test_schedules_of_ranks_equal_one_process_to_the_bit_or_are_refused(seeds):
    for seed, kind in enumerate(MESHES, start=seeds):
        program, rows = program_of(seed)
        ends = run(kind, program)
        if any([isinstance(end, BaseException) for end in ends]):
            assert all([isinstance(end, CompileError | PeerFailed) for end in ends]), (rows, ends)
        else:
            assert_one_model(ends, program, str(rows))


def assert_one_model(ends, program, text=""):
    """Compare what two ranks read and left, to the bit, and with one process."""
    (seen, state), (others, other_state) = ends
    assert (seen, state) == (others, other_state), text
    np.testing.assert_allclose(seen, alone(program), rtol=1e-3, err_msg=text)


@pytest.mark.parametrize("kind", MESHES)
def test_what_all_ranks_do_alike_between_steps_counts_as_in_one_process(kind):
    def program(script):
        for value, name in zip((0.1, 0.2, 0.05), ("up.weight", "scale", "down.bias"), strict=True):
            script.step()
            script.write(name, value)
            script.read()
            script.evaluate()
            script.step()
        script.load(0.1)
        script.stream()
        script.write("norm.running_mean", 0.3)
        script.fit()
        script.read()

    assert_one_model(run(kind, program), program)
