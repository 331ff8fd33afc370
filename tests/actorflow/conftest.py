import pytest
from graph_oracles import walked

from actorflow.nn.module import Module
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import Trace, recording
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import Output
from compiler.ops.primitives.sources import INPUT, VARIABLE


@pytest.fixture
def traced():
    """Run a function of (batch tensors...) in a trace and return the graph it records."""

    def run(function, model=None, *, is_training=True, **shapes):
        spec = {
            name: shape if isinstance(shape, TensorType) else TensorType(DType.FLOAT32, shape)
            for name, shape in shapes.items()
        }
        model = model if model is not None else Module()
        names = {id(p): n for n, p in model.named_parameters()}
        paths = {id(m): n for n, m in model.named_modules()}
        trace = Trace(spec, names, paths, is_training=is_training)
        with recording(trace):
            inputs = [Tensor(trace, trace.batch_input(name)) for name in spec]
            made = function(*inputs)
            trace.builder.outputs = [Output("y", made._value_in(trace))]
        return trace.builder.freeze()

    return run


@pytest.fixture
def evaluate():
    """Evaluate the first output of a graph with the ops' reference semantics."""

    def run(graph, **feeds):
        names = [n.attrs["name"] for n in graph.nodes if n.op in (INPUT, VARIABLE)]
        known = {name: feeds[name.replace(".", "_")] for name in names}
        return walked(graph.nodes, known)[graph.outputs[0].value]

    return run
