import argparse
import json
from dataclasses import replace

import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.cli import simulate as cli_simulate
from actorflow.cli.main import main
from actorflow.distributed import agreed_plan
from actors.kernels.library import openblas
from compiler.contract.errors import CompileError
from compiler.contract.placement import StreamRole
from compiler.contract.plan_tables import (
    Actor,
    ActorKind,
    Launch,
    Port,
    Register,
    RegisterKind,
    Stream,
    View,
)
from compiler.contract.types import ActorId, DType, RegisterId, StreamId, TensorType


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()


@pytest.fixture(scope="module")
def plan():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_NATIVE", "0")  # whose step is what the others wait for
        return compiled()


def compiled():
    return train.compile(nn.Linear(4, 4), {"x": TensorType(DType.FLOAT32, (4, 4))})


def with_all_reduce(plan):
    """Let the metrics of a step be averaged over ranks: one more edge, stream and actor."""
    step = next(a for a in plan.actors if a.name == "step")
    edge, stream = RegisterId(len(plan.registers)), StreamId(len(plan.streams))
    register = Register(edge, "gradients", RegisterKind.DATA, 0, 4096, 1, (0,), (0, 1), "")
    view = View(edge, 0, TensorType(DType.FLOAT32, (1024,)), (4,))
    launch = Launch(
        "any",
        "all_reduce",
        (("by", "sum"), ("group", "data"), ("num_ranks", 4), ("order", 0)),
        (len(plan.views),),
        (len(plan.views),),
        None,
        "",
        0,
        0.0,
    )
    comm = Actor(
        ActorId(len(plan.actors)), "reduce", ActorKind.COMM, stream, (launch,),
        (Port(edge, 1),), (), False, 0.0,
    )  # fmt: skip
    sending = replace(step, outputs=(*step.outputs, Port(edge, 1)))
    return replace(
        plan,
        registers=(*plan.registers, register),
        views=(*plan.views, view),
        streams=(*plan.streams, Stream(stream, plan.streams[0].device, StreamRole.COMM, 0, "comm")),
        actors=(*[sending if a is step else a for a in plan.actors], comm),
    )


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    cli_simulate.add_arguments(parser)
    return parser.parse_args(["--no-calibrate", *arguments])


def report(capsys, plan, *arguments):
    assert cli_simulate.run(plan, parsed("--json", *arguments)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", "0"),
        ("--devices", "0"),
        ("--link", "-1"),
        ("--link", "nan"),
        ("--latency", "-2"),
        ("--straggler", "0.5"),
        ("--jitter", "1"),
        ("--per-host", "0"),
        ("--inside", "0"),
        ("--inside-latency", "inf"),
        ("--per-rack", "-1"),
        ("--uplink", "-3"),
        ("--spread", "-0.1"),
    ],
)
def test_a_value_that_means_nothing_is_refused_before_there_is_a_plan(option, value):
    with raises(CompileError):
        cli_simulate.check_options(parsed(option, value))


def test_the_uplink_of_racks_that_there_are_not_is_refused():
    with raises(CompileError):
        cli_simulate.check_options(parsed("--uplink", "3"))
    cli_simulate.check_options(parsed("--uplink", "3", "--per-rack", "2"))


def test_a_hierarchy_of_hosts_that_are_not_full_is_a_ring(plan, capsys):
    asked = ("--devices", "10", "--per-host", "4")
    job = with_all_reduce(plan)
    ring = report(capsys, job, *asked, "--algorithm", "ring")["ranks"]
    assert report(capsys, job, *asked)["ranks"] == ring


def test_a_plan_of_several_hosts_is_simulated_on_these_where_nothing_else_is_said(plan, capsys):
    far = ("hosts", ((2,), (50.0, 1_000.0), (0.001, 0.0)))
    job = on_mesh(with_all_reduce(plan), data=4)
    found = report(capsys, replace(job, options=(*job.options, far)))["ranks"]
    asked = ("--per-host", "2", "--link", "0.001", "--latency", "0")
    assert found == report(capsys, job, *asked)["ranks"] != report(capsys, job)["ranks"]
    unlike = ("hosts", ((3, 1), *far[1][1:]))
    job = replace(job, options=(*job.options, unlike))
    with raises(CompileError):
        cli_simulate.run(job, parsed())
    assert report(capsys, job, "--per-host", "2")["ranks"]["devices"] == 4


def test_hosts_racks_and_their_links_are_what_the_options_say(plan, capsys):
    """Twelve ranks on three hosts in three racks: the uplinks are so slow that nothing else is."""
    job = with_all_reduce(plan)
    slow = ("--uplink", "0.0001", "--per-rack", "1", "--latency", "0", "--inside-latency", "0")
    found = {
        algorithm: report(
            capsys, job, "--devices", "12", "--per-host", "4", "--algorithm", algorithm, *slow
        )["ranks"]
        for algorithm in ("ring", "hierarchical")
    }
    transfer_ms = {"ring": 22 * 4096 / 12 / 1e2, "hierarchical": 4 * 4 * 4096 / 12 / 1e2}
    for algorithm, row in found.items():
        took = row["step_ms"] - row["alone_ms"]
        assert took == pytest.approx(transfer_ms[algorithm], rel=1e-2), algorithm


def test_ranks_whose_speeds_differ_wait_for_the_slowest(plan, capsys):
    row = report(capsys, with_all_reduce(plan), "--devices", "8", "--spread", "0.3")["ranks"]
    assert row["slowdown"] > 1
    assert row["late_ms"] > 0


def on_mesh(plan, **axes):
    return replace(plan, options=(*plan.options, ("mesh", tuple(axes.items()))))


def test_ranks_of_a_mesh_meet_in_their_groups(plan, capsys):
    job = on_mesh(with_all_reduce(plan), data=4, model=3)
    row = report(capsys, job)["ranks"]
    assert row["devices"] == 12
    assert row["wire_mb"] == pytest.approx(2 * 3 / 4 * 4096 / 1e6)
    with raises(CompileError):
        cli_simulate.run(job, parsed("--devices", "8"))


def test_the_plan_of_some_ranks_is_not_simulated_as_that_of_all(plan):
    job = on_mesh(with_all_reduce(plan), data=2)
    with raises(CompileError):
        cli_simulate.run(job, parsed())


def test_ranks_that_would_never_meet_are_refused(plan):
    with raises(CompileError):
        cli_simulate.run(plan, parsed("--devices", "8"))
    with raises(CompileError):
        cli_simulate.run(plan, parsed("--straggler", "2"))


def test_the_report_is_that_of_the_simulated_run(plan, capsys):
    found = report(capsys, plan, "--steps", "40")
    step_ms = next(a.duration_ns for a in plan.actors if a.name == "step") / 1e6
    assert (found["plan"], found["steps"], found["rates"]) == ("train", 40, "estimated")
    assert found["step_ms"] == pytest.approx(step_ms, abs=1e-5)
    assert found["ranks"] is None
    assert sum(part["share"] for part in found["critical_path"]) == pytest.approx(1, abs=0.01)
    assert [stream["name"] for stream in found["streams"]] == [s.name for s in plan.streams]


def test_a_row_tells_what_more_devices_cost(plan, capsys):
    job = with_all_reduce(plan)
    found = report(capsys, job, "--devices", "4", "--link", "0.001", "--latency", "0")["ranks"]
    assert found["devices"] == 4
    assert found["wire_mb"] == pytest.approx(2 * 3 / 4 * 4096 / 1e6)
    transfer_ms = 2 * 3 / 4 * 4096 / 1e6 * 1e3
    assert found["step_ms"] == pytest.approx(found["alone_ms"] + transfer_ms, rel=1e-3)
    assert found["efficiency"] == pytest.approx(found["alone_ms"] / found["step_ms"])


def test_the_text_holds_streams_path_and_row(plan, capsys):
    job = with_all_reduce(plan)
    assert cli_simulate.run(job, parsed("--devices", "2", "--straggler", "1.5")) == 0
    text = capsys.readouterr().out
    assert "100 steps of 'train' take " in text
    assert "rates: the plan's estimates" in text
    assert "critical path: step " in text
    assert "the slowest (1.50 times)" in text
    assert text.splitlines()[-1].startswith("| 2 | ")


def test_the_timeline_is_written(plan, tmp_path, capsys):
    path = tmp_path / "trace.json"
    cli_simulate.run(plan, parsed("--trace", str(path), "--steps", "3"))
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and e["name"] == "step" for e in events) == 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("arguments", "times"), [([], 1), (["--calibrate"], 2)])
def test_measured_rates_are_kept_and_measured_again_on_demand(
    plan, tmp_path, capsys, monkeypatch, probes, arguments, times
):
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))
    parser = argparse.ArgumentParser()
    cli_simulate.add_arguments(parser)
    assert cli_simulate.run(plan, parser.parse_args([])) == 0
    once = len(probes.measured)
    assert cli_simulate.run(plan, parser.parse_args(arguments)) == 0
    assert len(probes.measured) == times * once > 0
    assert "rates: measured on this machine" in capsys.readouterr().out


@pytest.mark.slow
def test_threads_that_a_product_took_from_numpy_do_not_measure_again(
    plan, tmp_path, monkeypatch, probes
):
    def duration_ns(probe):
        openblas.use_threads(1)  # as the first product of native kernels does
        return 1e6

    probes.duration_ns = duration_ns
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))
    parser = argparse.ArgumentParser()
    cli_simulate.add_arguments(parser)
    openblas.use_threads(None)
    try:
        cli_simulate.run(plan, parser.parse_args([]))
        once = len(probes.measured)
        cli_simulate.run(plan, parser.parse_args([]))
        assert len(probes.measured) == once > 0
    finally:
        openblas.use_threads(None)


def test_launches_of_a_gpu_are_priced_by_its_description_and_nothing_is_measured(
    plan, capsys, probes
):
    planned = replace(plan, options=(*plan.options, ("gpu", "h200")))
    parser = argparse.ArgumentParser()
    cli_simulate.add_arguments(parser)
    assert cli_simulate.run(planned, parser.parse_args([])) == 0
    assert "(rates: the description of h200)" in capsys.readouterr().out
    assert probes.measured == []
    with raises(CompileError):
        cli_simulate.run(planned, parser.parse_args(["--calibrate"]))


@pytest.mark.slow
def test_without_a_cache_rates_are_measured_every_time(plan, capsys, monkeypatch, probes):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    parser = argparse.ArgumentParser()
    cli_simulate.add_arguments(parser)
    assert cli_simulate.run(plan, parser.parse_args([])) == 0
    assert "measured" in capsys.readouterr().out


def test_the_plan_of_one_of_several_ranks_moves_its_gradients(capsys):
    model = nn.Linear(4, 4)

    @af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=4))
    def among(model, batch):
        return model(batch.x).mean()

    job = among.compile(model, {"x": TensorType(DType.FLOAT32, (4096, 4))})
    found = report(capsys, job)["ranks"]
    assert found["devices"] == 4
    assert report(capsys, job, "--devices", "9")["ranks"]["devices"] == 9
    most = 2 * 3 / 4 * (4 * 4 + 4) * 4 / 1e6
    assert most / 2 < found["wire_mb"] <= most * 1.06  # and the loss
    assert 0 < found["efficiency"] < 1


STAGED = """
import numpy as np
import actorflow as af
from actorflow import nn

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 3)

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(x))
        with af.stage(1):
            return self.down(h)

@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(stage=2, data=2))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

x = np.ones((24, 8), np.float32)
data = af.data.ArraySource({"x": x, "y": np.arange(24) % 3}, batch=ROWS)
train.fit(Net(), data, steps=1)
"""


@pytest.mark.parametrize(
    ("rows", "classes"), [(6, [(2, 0), (2, 2)]), (7, [(1, r) for r in range(4)])]
)
def test_classes_of_ranks_are_compiled_once_each_and_simulated_together(
    tmp_path, capsys, rows, classes
):
    script = tmp_path / "staged.py"
    script.write_text(STAGED.replace("ROWS", str(rows)))
    request = ["simulate", str(script), "--no-calibrate", "--steps", "5"]
    assert main([*request, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(own["ranks"], own["first"]) for own in found["classes"]] == classes
    assert found["ranks"]["devices"] == 4
    assert main(request) == 0
    assert "  class 1: " in capsys.readouterr().out


def test_a_mesh_is_planned_and_simulated_on_the_hosts_that_are_asked_for(tmp_path, capsys):
    """The stages lie on two hosts of two, or on one; a slow link between hosts matters to both."""
    script, far = tmp_path / "staged.py", ("--link", "0.0001", "--latency", "0")
    script.write_text(STAGED.replace("ROWS", "6"))
    request = ["simulate", str(script), "--no-calibrate", "--steps", "5", "--json", *far]
    step_ms = {}
    for per_host in ("1", "2", "4"):
        assert main([*request, "--per-host", per_host]) == 0
        step_ms[per_host] = json.loads(capsys.readouterr().out)["ranks"]["step_ms"]
    # Between stages 3 rows of 32 floats go there and back; both ranks of a host share its link.
    assert step_ms["2"] > 2 * 384 / 0.5e-4 / 1e6 > step_ms["4"]
    assert step_ms["1"] > step_ms["2"]


def test_ranks_by_their_number_are_one_class_that_nobody_looks_for(tmp_path, capsys, monkeypatch):
    script = tmp_path / "wide.py"
    script.write_text(STAGED.replace("ROWS", "6").replace(", mesh=af.Mesh(stage=2, data=2)", ""))
    monkeypatch.setattr(agreed_plan, "_own_class", None)
    request = ["simulate", str(script), "--no-calibrate", "--steps", "2", "--devices", "300"]
    assert main([*request, "--json"]) == 0
    (own,) = json.loads(capsys.readouterr().out)["classes"]
    assert (own["ranks"], own["first"]) == (300, 0)
