"""Where ops of a traced job run, and what a job may say of devices."""

import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import SettingsError
from compiler.contract.types import Phase
from compiler.graph.graph import UNPLACED
from compiler.passes import autodiff

SPEC = {"x": af.TensorType(af.DType.FLOAT32, (4, 6)), "y": af.TensorType(af.DType.FLOAT32, (4, 3))}
TWO = ["sim:0", "sim:1"]


class Halves(nn.Module):
    def __init__(self):
        self.lower, self.upper = nn.Linear(6, 5), nn.Linear(5, 3)


def traced(body, **options):
    """Return the graph of a training job with this body."""
    options = {"devices": TWO, "optimizer": af.optim.AdamW(0.1), **options}
    return af.job(body, **options).graph(Halves(), SPEC)


def variables(graph):
    return {n.attrs["name"]: n.device for n in graph.nodes if n.op.name == "variable"}


def test_a_region_places_its_ops_with_their_parameters_and_optimizer_state():
    def train(model, batch):
        h = model.lower(batch.x)
        with af.device("sim:1"):
            h = model.upper(h)
        return af.mse_loss(h, batch.y)

    graph = traced(train)
    assert [n.device for n in graph.nodes if n.op.name == "matmul"] == [0, 1]
    found = variables(graph)
    assert {found[f"{p}lower.weight"] for p in ("", "adam_m/", "adam_v/")} == {0}
    assert {
        found[f"{p}upper.{q}"] for p in ("", "adam_m/", "adam_v/") for q in ("weight", "bias")
    } == {1}
    inputs = {n.attrs["name"]: n.device for n in graph.nodes if n.op.name == "input"}
    assert inputs == {"x": 0, "y": 1}


def test_what_reads_a_copied_tensor_runs_where_the_copy_lies():
    def train(model, batch):
        h = model.lower(batch.x).to("sim:1")
        return af.mse_loss(model.upper(h), batch.y)

    graph = traced(train)
    assert [n.device for n in graph.nodes if n.op.name == "matmul"] == [0, 1]
    (copy,) = [n for n in graph.nodes if n.op.name == "copy_to"]
    assert copy.attrs["to"] == 1
    assert variables(graph)["upper.weight"] == 1


def test_a_parameter_that_only_a_copy_reads_lies_on_the_first_device():
    def train(model, batch):
        model.lower.bias.freeze(), model.upper.bias.freeze()
        weight = model.lower.weight.to("sim:1")
        h = batch.x @ weight.T
        return (h @ model.upper.weight.T).mean()

    found = variables(traced(train))
    assert (found["lower.weight"], found["upper.weight"]) == (0, 1)


def test_the_innermost_region_counts_and_an_error_leaves_it():
    far, near = af.device("sim:1"), af.device("sim:0")

    def train(model, batch):
        with far:
            with near:
                h = model.lower(batch.x)
            with pytest.raises(ZeroDivisionError), near:
                raise ZeroDivisionError
            h = model.upper(h)
        return af.mse_loss(h.to("sim:0"), batch.y)

    graph = traced(train)
    assert [n.device for n in graph.nodes if n.op.name == "matmul"] == [0, 1]
    assert next(n.device for n in reversed(graph.nodes) if n.op.name == "sub") == 0


def test_a_job_that_names_no_device_is_left_to_the_compiler():
    def train(model, batch):
        return af.mse_loss(model.upper(model.lower(batch.x)), batch.y)

    assert {n.device for n in traced(train).nodes} == {UNPLACED}
    assert {n.device for n in traced(train, devices=None).nodes} == {0}
    assert {n.device for n in traced(train, devices=None, device="sim:3").nodes} == {0}


def test_on_one_device_a_region_and_a_copy_to_it_change_nothing():
    def plain(model, batch):
        return af.mse_loss(model.upper(model.lower(batch.x)), batch.y)

    def named(model, batch):
        with af.device("sim:1"):
            h = model.lower(batch.x)
        return af.mse_loss(model.upper(h.to("sim:1")), batch.y)

    options = {"devices": None, "device": "sim:1"}
    one, other = traced(plain, **options), traced(named, **options)
    assert [n.op for n in one.nodes] == [n.op for n in other.nodes]
    assert {n.device for n in other.nodes} == {0}


def test_operands_on_two_devices_are_refused_with_the_lines_that_made_them():
    def train(model, batch):
        with af.device("sim:1"):
            far = model.upper(model.lower(batch.x))
        with af.device("sim:0"):
            near = batch.y * 2.0
        return (far + near).mean()

    with raises(af.CompileError):
        traced(train)


@pytest.mark.parametrize("name", ["smi:1", "sim:", "sim:-1", "sim:x", "gpu:0"])
def test_a_device_that_is_none_is_refused_with_the_kinds_and_the_line(name):
    for use in (lambda h: h.to(name), lambda h: af.device(name)):

        def train(model, batch, use=use):
            return use(model.lower(batch.x)).mean()

        with raises(af.CompileError):
            traced(train)


def test_a_device_that_is_not_the_jobs_is_refused_with_what_to_write():
    def train(model, batch):
        with af.device("sim:2"):
            return model.lower(batch.x).mean()

    with raises(af.CompileError):
        traced(train)


def test_a_region_outside_of_a_job_is_refused():
    with raises(af.CompileError), af.device("sim:1"):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"device": "tpu"},
        {"devices": ["sim", "sim:0"]},
        {"devices": []},
        {"devices": "sim"},
        {"device": "sim", "devices": ["sim"]},
        {"device": 3},
    ],
)
def test_devices_that_no_job_can_have_are_refused_where_it_is_decorated(options):
    with raises(af.CompileError):

        @af.job(train=False, **options)
        def train(model, batch):
            return batch.x


def test_the_environment_names_the_device_of_a_job_that_names_none(monkeypatch):
    monkeypatch.setenv("ACTORFLOW_DEVICE", "sim:2")
    free, named = (af.job(lambda m, b: b.x, train=False, device=d) for d in (None, "sim:1"))
    assert [str(d) for d in (*free.devices, *named.devices)] == ["sim:2", "sim:1"]
    monkeypatch.setenv("ACTORFLOW_DEVICE", "sim:0, sim:1")
    assert [str(d) for d in free.devices] == ["sim:0", "sim:1"]
    monkeypatch.setenv("ACTORFLOW_DEVICE", "sim:1,sim:1")
    with raises(SettingsError):
        _ = free.devices
    monkeypatch.setenv("ACTORFLOW_DEVICE", "gpu")
    with raises(SettingsError):
        _ = free.devices


def test_gradients_follow_their_ops_to_the_other_device():
    def train(model, batch):
        h = model.lower(batch.x).to("sim:1")
        return af.mse_loss(model.upper(h), batch.y)

    after = autodiff.differentiate(traced(train))
    backward = [
        n.device for n in after.nodes if n.phase is Phase.BACKWARD and n.op.name == "matmul"
    ]
    assert sorted(backward) == [0, 0, 1, 1]
