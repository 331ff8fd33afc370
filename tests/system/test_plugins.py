"""An installed package, and a user's script, add passes and kernels without an edit of ours."""

import pytest

PLUGIN = """
import dataclasses

import actorflow as af


@af.graph_pass(after="simplify")
def doubled(graph):
    nodes = []
    for node in graph.nodes:
        if node.op.name == "relu":
            node = dataclasses.replace(node, op=af_op("tanh"))
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def af_op(name):
    from compiler.graph.registry import find_op

    return find_op(name)
"""

JOB = """
import numpy as np

import actorflow as af


@af.job(train=False)
def f(model, batch):
    return {"y": af.relu(batch.x).sum()}


class Nothing(af.nn.Module):
    def __call__(self, x):
        return x


plan = f.compile(Nothing(), {"x": af.TensorType(af.DType.FLOAT32, (2, 3))})
print([dict(launch.attrs).get("members") for a in plan.actors for launch in a.launches])
"""


@pytest.fixture
def install(tmp_path):
    """Return the folder of an installed package whose entry point is the given module."""

    def make(code):
        folder = tmp_path / "site"
        info = folder / "my_plugin-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "my_plugin.py").write_text(code)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[actorflow.plugins]\nmine = my_plugin\n")
        return folder

    return make


def run_with(run_python, folder, code, **options):
    inserted = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
    return run_python(inserted + code, **options)


def test_a_pass_of_an_installed_package_runs_and_is_named_in_the_log(run_python, install, tmp_path):
    cache = {"ACTORFLOW_CACHE": str(tmp_path / "cache"), "ACTORFLOW_LOG": "info"}
    plain = run_python(JOB, **cache)
    changed = run_with(run_python, install(PLUGIN), JOB, **cache)
    assert "relu" in plain.stdout
    assert "tanh" in changed.stdout
    assert "plugin 'mine' of my-plugin is loaded: my_plugin" in changed.stderr
    assert "comes from" not in changed.stderr  # another plan than the one that was kept


def test_a_package_that_cannot_be_loaded_is_named(run_python, install):
    done = run_with(run_python, install("import no_such_thing\n"), JOB, check=False)
    assert "CompileError: plugin 'mine' of my-plugin (my_plugin) cannot be loaded" in done.stderr
    assert "No module named 'no_such_thing'" in done.stderr


def test_the_command_line_shows_the_passes_of_packages_in_their_place(run_python, install):
    code = "from actorflow.cli.main import main\nmain(['passes'])\n"
    shown = run_with(run_python, install(PLUGIN), code).stdout.splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in shown]
    assert names[names.index("simplify") + 1] == "doubled"
    assert next(line for line in shown if "| doubled |" in line).endswith("my_plugin.py |")
