"""Layouts that a user gives, down to the graphs of ranks: who holds what, and whose numbers."""

import pytest
from rank_jobs import check_step, laid_out, step_graph

import actorflow as af
from actorflow import nn
from compiler.contract.plan_tables import ActorKind
from compiler.contract.sbp import BROADCAST, PARTIAL, Split
from compiler.ops.primitives.transfer import DEFERRED

MODEL = {"model": af.split(0)}


def of(dtype, *shape):
    return af.TensorType(af.DType(dtype), shape)


class Pair(nn.Module):
    def __init__(self, first, last):
        self.first, self.last = nn.Linear(6, 8, sbp=first), nn.Linear(8, 5, sbp=last)

    def __call__(self, x):
        return self.last(af.gelu(self.first(x)))


class Words(nn.Module):
    """A table by rows or columns, a block of shared heads, and classes of which each has some."""

    def __init__(self, table, block):
        self.table = nn.Embedding(12, 8, sbp=table)
        self.block = block
        self.head = nn.Linear(8, 12, bias=False, sbp=MODEL)

    def __call__(self, x):
        x = self.block(self.table(x))
        return self.head(x[0] if isinstance(x, tuple) else x).reshape(-1, 12)


class Heads(nn.MultiheadAttention):
    def __call__(self, x):
        return super().__call__(x, x, x, need_weights=False)[0]


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y.reshape(-1))


def given_whole(model, batch):
    """A batch that every rank is given whole, and values laid out in between."""
    x = batch.x.to_sbp(data="B")
    h = af.gelu(model.first(x)).to_sbp(model=af.split(1), data=af.split(0))
    return af.cross_entropy(model.last(h).to_sbp(data=af.partial), batch.y)


ROWS = {"x": of("float32", 6, 6), "y": of("int64", 6)}
IDS = {"x": of("int64", 6, 4), "y": of("int64", 6, 4)}
JOBS = {
    "columns, then terms": (loss, lambda: Pair(MODEL, {"model": af.split(1)}), ROWS),
    "terms, then columns": (loss, lambda: Pair({"model": af.split(-1)}, MODEL), ROWS),
    "a weight in parts of parts": (
        loss,
        lambda: Pair({"data": af.split(0), "model": af.split(0)}, {"weight": {"data": "S(1)"}}),
        ROWS,
    ),
    "laid out in between": (given_whole, lambda: Pair(MODEL, None), ROWS),
    "rows of a table": (
        loss,
        lambda: Words(MODEL, nn.TransformerBlock(8, heads=4, causal=True, sbp=MODEL)),
        IDS,
    ),
    "columns of a table": (
        loss,
        lambda: Words({"model": af.split(1)}, Heads(8, 4, batch_first=True, sbp=MODEL)),
        IDS,
    ),
    "torch's layer": (
        loss,
        lambda: Words(None, nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True, sbp=MODEL)),
        IDS,
    ),
}


def graph_of(name, mesh):
    """Return the graph of a job's step."""
    function, model, spec = JOBS[name]
    job = af.job(optimizer=af.optim.AdamW(1e-2), clip_norm=0.5, mesh=mesh)(function)
    return step_graph(job, model(), spec)


@pytest.mark.parametrize("mesh", [af.Mesh(data=2, model=2), af.Mesh(model=2, data=3)], ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_ranks_that_lie_as_the_user_says_do_the_step_of_one(name, mesh):
    graph = graph_of(name, mesh)
    layouts, graphs = check_step(graph, mesh)
    said = [node for node in graph.nodes if "sbp" in node.attrs]
    assert said
    for node in said:
        words = dict(zip(mesh.names, layouts.of(node.outputs[0]), strict=True))
        for axis, text in node.attrs["sbp"]:
            assert str(words[axis]) == text, node
    assert not any(node.op.name == "to_sbp" for local in graphs for node in local.nodes)


def test_state_of_the_optimizer_lies_as_its_parameter_does():
    mesh = af.Mesh(data=2, model=2)
    graph = graph_of("columns, then terms", mesh)
    layouts = laid_out(graph, mesh)
    words = {n.attrs["name"]: layouts.of(n.outputs[0]) for n in graph.nodes if "role" in n.attrs}
    assert words["first.weight"] == (BROADCAST, Split(0))
    assert words["last.weight"] == (BROADCAST, Split(1))
    for name, word in words.items():
        if "/" in name and name.startswith("adam"):
            assert word == words[name.partition("/")[2]]


def test_a_value_that_is_laid_out_as_terms_is_summed_by_who_reads_it():
    mesh = af.Mesh(data=2, model=2)
    graph = graph_of("laid out in between", mesh)
    layouts = laid_out(graph, mesh)
    terms = [n for n in graph.nodes if n.attrs.get("sbp") == (("data", "P"),)]
    assert [layouts.of(n.outputs[0])[0] for n in terms] == [PARTIAL]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"accumulate": 4}], ids=str)
@pytest.mark.parametrize(("ranks", "rows"), [(2, 32), (3, 8), (4, 32)])
def test_ranks_of_a_small_net_meet_for_gradients_and_the_loss_alone(ranks, rows, options):
    """Waiting in the middle of a step costs more than the bytes that it saves."""

    @af.job(optimizer=af.optim.AdamW(1e-3), mesh=af.Mesh(data=ranks), **options)
    def train(model, batch):
        return af.mse_loss(model(batch.x), batch.y)

    x = of("float32", rows, 64)
    plan = train.compile(nn.MLP(64), {"x": x, "y": x})
    met = [launch for a in plan.actors if a.kind is ActorKind.COMM for launch in a.launches]
    assert {(launch.op, dict(launch.attrs)["when"]) for launch in met} == {("all_reduce", DEFERRED)}
    parameters = [v.view for v in plan.variables if v.role == "parameter"]
    views = [*parameters, *[launch.inputs[0] for launch in met]]
    elements = [plan.views[view].type.num_elements for view in views]
    assert 1 + sum(elements[: len(parameters)]) == sum(elements[len(parameters) :])


class Table(nn.Module):
    def __init__(self):
        self.table, self.down = nn.Embedding(10_000, 512), nn.Linear(512, 12)

    def __call__(self, x):
        return self.down(self.table(x)).reshape(-1, 12)


def test_a_gradient_is_not_cut_into_columns_to_be_written_beside_zeros():
    """That saves a rank the other columns of a table, and then it writes all of them."""

    @af.job(optimizer=af.optim.AdamW(1e-3), mesh=af.Mesh(data=8), accumulate=2, clip_norm=1.0)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y.reshape(-1))

    plan = train.compile(Table(), {n: of("int32", 8, 512) for n in "xy"})
    assert not [x for a in plan.actors for x in a.launches if x.op == "pad"]
