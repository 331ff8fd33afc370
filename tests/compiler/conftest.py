import numpy as np
import pytest

import compiler.ops.standard  # noqa: F401  # registers the ops
from compiler.graph import Graph, GraphBuilder
from compiler.ops.sources import CONSTANT, INPUT, VARIABLE
from compiler.registry import reference
from compiler.target import KernelInfo


class FakeTarget:
    """Has a kernel for every op but sin.

    add and mul may write over their first input; layer_norm wants scratch.
    """

    device_kind = "fake"
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
    values = {}
    for node in graph.nodes:
        if node.op in (INPUT, VARIABLE):
            values[node.outputs[0]] = np.asarray(feeds[node.attrs["name"]])
            continue
        arrays = [values[v] for v in node.inputs]
        for value, array in zip(
            node.outputs, reference.get(node.op)(node.attrs, *arrays), strict=True
        ):
            values[value] = array
    names = {node.outputs[0]: node.attrs["name"] for node in graph.nodes if node.op is VARIABLE}
    outputs = {o.name: values[o.value] for o in graph.outputs}
    written = {names[w.variable]: values[w.value] for w in graph.writes}
    return outputs, written


class Sketch:
    """A graph under construction, in the words of the tests."""

    def __init__(self):
        self.b = GraphBuilder()

    def input(self, name, shape, dtype="float64"):
        return self.b.one(INPUT, name=name, dtype=dtype, shape=shape)

    def variable(self, name, shape, dtype="float64", role="parameter"):
        init = (("kind", "zeros"),)
        return self.b.one(VARIABLE, name=name, dtype=dtype, shape=shape, role=role, init=init)

    def constant(self, array):
        array = np.asarray(array)
        return self.b.one(CONSTANT, dtype=str(array.dtype), shape=array.shape, data=array.tobytes())


@pytest.fixture
def sketch():
    return Sketch()


@pytest.fixture
def evaluate():
    return run_graph


@pytest.fixture(scope="session")
def evaluate_graphs():
    """Like `evaluate`, for properties: hypothesis wants fixtures that outlive an example."""
    return run_graph


@pytest.fixture
def fake_target():
    return FakeTarget()


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
