"""Names of modules that earlier pages showed: they work, and say what they are called now."""

import subprocess
import sys
from importlib import import_module

import pytest
from error_texts import raises

from compiler.contract import old_names

SHOWN = [
    "from actors.kernels import catalogue",
    "from actors.kernels.kernel import KernelNeeds",
    "from actors.kernels.native import runtime",
    "from actors.kernels.native.prepare import functions_of",
    "from actors.simulate import simulate",
    "from compiler import added_passes",
    "from compiler.attrs import NO_ATTRS",
    "from compiler.errors import InternalError",
    "from compiler.options import CompileOptions",
    "from compiler.pipeline import PASSES",
    "from compiler.placement import HOST",
    "from compiler.plan import Plan, Actor, Launch",
    "from compiler.registry import cost, find_op, reference",
    "from compiler.types import DType, TensorType",
    "from compiler.verify import verify_plan",
]
"""The imports of README, docs/tour.md, docs/extend.md and docs/kernels.md of version 0.1."""


@pytest.fixture(autouse=True)
def forgotten():
    """Load each old module anew, and leave none behind."""
    yield
    for name in old_names.MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("statement", SHOWN)
def test_an_import_of_an_earlier_page_works_and_names_the_new_module_at_its_line(statement):
    names = {}
    code = compile(statement, "users.py", "exec")
    with pytest.warns(DeprecationWarning, match=r"is now .*; the old name is removed") as caught:
        exec(code, names)
    # `from package import name` asks a package twice; a process shows equal warnings once.
    ((text, file, line),) = {(str(w.message), w.filename, w.lineno) for w in caught}
    assert (file, line) == ("users.py", 1)
    new = text.split()[3]
    assert new in sys.modules or new.rpartition(".")[0] in sys.modules
    wanted = [name.strip() for name in statement.partition(" import ")[2].split(",")]
    assert [name for name in wanted if names.get(name) is None] == []


def test_classes_by_old_names_are_those_by_new_ones():
    with pytest.warns(DeprecationWarning, match=r"compiler\.contract\.plan"):
        from compiler.plan import Actor, Plan
    from compiler.contract import plan, plan_tables

    assert (Plan, Actor) == (plan.Plan, plan_tables.Actor)


def test_what_never_was_is_an_import_error_as_everywhere():
    with raises(ModuleNotFoundError):
        import_module("compiler.plans")
    with raises(ImportError):
        exec("from compiler.verify import no_such", {})
    with (
        pytest.warns(DeprecationWarning, match="is now"),
        raises(ImportError),
    ):
        exec("from compiler.plan import Plam", {})


def test_a_script_reads_the_warning_once_and_goes_on():
    script = "from compiler.plan import Plan\nimport actorflow as af\nassert af.Plan is Plan\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DeprecationWarning: compiler.plan is now compiler.contract.plan") == 1


def test_a_process_has_one_finder():
    old_names.install()
    assert len([f for f in sys.meta_path if isinstance(f, old_names.OldNames)]) == 1
