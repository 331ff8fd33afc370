import numpy as np
import pytest
from changed_passes import change_passes
from graph_oracles import walked
from graphs import HostCosts

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.graph.graph import Graph, GraphBuilder
from compiler.graph.target import KernelInfo, one_device
from compiler.ops.primitives.sources import CONSTANT, INPUT, VARIABLE
from compiler.pipeline import pipeline
from compiler.verify.verify import edges_of


class FakeTarget(HostCosts):
    """Has a kernel for every op but sin.

    add and mul may write over their first input; layer_norm wants scratch.
    """

    fingerprint = "fake-1"

    def query(self, call):
        if call.op == "sin":
            raise LookupError("no kernel for op sin")
        in_place = ((0, 0),) if call.op in ("add", "mul", "neg", "exp") else ()
        scratch = 100 if call.op in ("layer_norm", "softmax") else 0
        return KernelInfo(f"fake.{call.op}", scratch, in_place, 1000.0)


def run_graph(graph: Graph, feeds: dict):
    """Evaluate a graph node by node with the ops' reference column.

    Returns the outputs and the final variables.
    """
    values = walked(graph.nodes, feeds)
    names = {node.outputs[0]: node.attrs["name"] for node in graph.nodes if node.op is VARIABLE}
    outputs = {o.name: values[o.value] for o in graph.outputs}
    written = {names[w.variable]: values[w.value] for w in graph.writes}
    return outputs, written


class Sketch:
    """A graph under construction, in the words of the tests."""

    def __init__(self):
        self.b = GraphBuilder()

    def input(self, name, shape, dtype="float64"):
        return self.b.emit_one(INPUT, name=name, dtype=dtype, shape=shape)

    def variable(self, name, shape, dtype="float64", role="parameter"):
        init = (("kind", "zeros"),)
        return self.b.emit_one(VARIABLE, name=name, dtype=dtype, shape=shape, role=role, init=init)

    def constant(self, array):
        array = np.asarray(array)
        return self.b.emit_one(
            CONSTANT, dtype=str(array.dtype), shape=array.shape, data=array.tobytes()
        )


@pytest.fixture
def sketch():
    return Sketch()


@pytest.fixture
def op_by_op(monkeypatch):
    """Leave fusion out, so that every op is a launch: for what is said about launches as such."""
    fusion = [p.name for p in pipeline.PASSES]
    fusion = ["channels_last", *fusion[fusion.index("stage_reductions") : fusion.index("order")]]
    change_passes(monkeypatch, **dict.fromkeys(fusion, lambda graph, *_: graph))


@pytest.fixture
def evaluate():
    return run_graph


@pytest.fixture(scope="session")
def evaluate_graphs():
    """Like `evaluate`, for properties: hypothesis wants fixtures that outlive an example."""
    return run_graph


@pytest.fixture
def fake_target():
    return one_device(FakeTarget())


@pytest.fixture(scope="session")
def sequence_without():
    """Make a sequence of a problem that forgets some buffers where the forward ops end.

    What is forgotten is made again right before the first op that is not forward and reads it.
    """

    def make(problem, forgotten):
        makers = problem.makers
        sequence = list(range(problem.num_forward))
        at_hand = [makers[b] >= 0 and b not in forgotten for b in range(len(makers))]

        def bring(buffer):
            if makers[buffer] < 0 or at_hand[buffer]:
                return
            for needed in problem.ops[makers[buffer]].reads:
                bring(needed)
            sequence.append(makers[buffer])
            for made in problem.ops[makers[buffer]].writes:
                at_hand[made] = True

        for i in range(problem.num_forward, len(problem.ops)):
            for buffer in problem.ops[i].reads:
                bring(buffer)
            sequence.append(i)
        return tuple(sequence)

    return make


@pytest.fixture(scope="session")
def play():
    """Play the token game of a plan."""
    return play_tokens


def play_tokens(plan, rng, batches):
    """Yield (actor, firing, is_start) of a run in which any firing may take any time.

    A firing takes its tokens and its free slots when it starts and hands all on when it ends; an
    actor fires one by one. The source stops after some batches.
    """
    edges, _ = edges_of(plan)
    tokens = [0] * len(edges)
    free = [edge.num_slots for edge in edges]
    fired, running = [0] * len(plan.actors), set()
    source = next(a.id for a in plan.actors if a.name == "data")

    def can_start(actor):
        return (
            actor not in running
            and (actor != source or fired[actor] < batches)
            and all(tokens[i] >= e.consume for i, e in enumerate(edges) if e.consumer == actor)
            and all(free[i] >= e.produce for i, e in enumerate(edges) if e.producer == actor)
        )

    while True:
        moves = [(a, True) for a in range(len(fired)) if can_start(a)]
        moves += [(a, False) for a in sorted(running)]
        if not moves:
            return
        actor, is_start = rng.choice(moves)
        yield actor, fired[actor], is_start
        for i, edge in enumerate(edges):
            if is_start:
                tokens[i] -= edge.consume if edge.consumer == actor else 0
                free[i] -= edge.produce if edge.producer == actor else 0
            else:
                tokens[i] += edge.produce if edge.producer == actor else 0
                free[i] += edge.consume if edge.consumer == actor else 0
        if is_start:
            running.add(actor)
        else:
            running.remove(actor)
            fired[actor] += 1
