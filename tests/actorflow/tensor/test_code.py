import json
import os
import sysconfig
import textwrap
from contextlib import contextmanager

import numpy as np
import pytest

import actorflow
from actorflow.tensor.tracer import code_facts, find_source, is_ours, is_users, is_users_module


def facts(text):
    return code_facts(compile(textwrap.dedent(text), "some.py", "exec"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = True"),
        ("x = 1", "x = 1.0"),
        ("x = 0.0", "x = -0.0"),
        ("x = (1, 2)", "x = (1, True)"),
        ("x = y in {1, 2}", "x = y in {1, 3}"),
        ("x = 'a'", "x = b'a'"),
        ("x = y.a", "x = y.b"),
        ("x = f(a=1)", "x = f(b=1)"),
        ("x = lambda: 1", "x = lambda: 2"),
        ("x = lambda a: 1", "x = lambda *, a: 1"),
        ("x = [f(y) for y in z]", "x = [g(y) for y in z]"),
        ("x = a + b", "x = a - b"),
    ],
)
def test_other_code_has_another_digest(one, other):
    assert facts(one).digest != facts(other).digest


def test_code_that_only_moved_is_the_same():
    text = "def f(x, by=2):\n    return [x * by for _ in range(3)]\n"
    assert facts(text).digest == facts("\n\n# moved\n" + text).digest
    assert facts("x = y in {'a', 'b', 'c'}").digest == facts("x = y in {'c', 'a', 'b'}").digest


def test_names_are_those_of_the_functions_inside_as_well():
    found = facts(
        """
        def outer():
            import first.second
            local = 1
            def inner():
                return GLOBAL.attribute + local
            return inner
        """
    )
    assert "GLOBAL" in found.loads
    assert "local" not in found.loads
    assert found.imports == ("first.second",)
    assert {"GLOBAL", "attribute"} <= found.names


def test_whose_a_file_is():
    ours, library, numpys = actorflow.__file__, json.__file__, np.__file__
    assert [is_users(f) for f in (ours, library, numpys, "<frozen os>")] == [False] * 4
    assert all(is_users(f) for f in (__file__, "<stdin>", "train.py", "/home/me/memory/x.py"))
    assert is_ours(ours)
    assert not is_ours(__file__)
    assert not is_users(os.path.join("lib", "site-packages", "some", "x.py"))
    assert [is_users_module(n) for n in ("actorflow.jobs.job", "json", "numpy", "_io")] == [
        False
    ] * 4
    assert is_users_module("a module that is gone")


def called_from(file, module):
    """Return the line that is taken for the user's, of a call in a file as of some module."""
    made = compile("def call(function):\n    return function()\n", str(file), "exec")
    namespace = {"__name__": module}
    exec(made, namespace)
    return namespace["call"](find_source)


def test_python_is_not_the_user_but_what_lies_in_its_folder_may_be():
    """The user's line is that of his file wherever it lies, and never one of the library."""
    library = sysconfig.get_path("stdlib")
    with contextmanager(lambda: (yield find_source()))() as found:
        assert found.file.endswith("test_code.py")  # and not the line of contextlib
    for file, module in ((f"{library}/threading.py", "threading"), ("<frozen runpy>", "runpy")):
        assert called_from(file, module).file.endswith("test_code.py")
    installed = f"{library}/site-packages/theirs/train.py"
    for file, module in (
        (f"{library}/mine.py", "__main__"),
        (f"{library}/mine.py", "mine"),
        (installed, "theirs.train"),
        ("/home/me/contextlib.py", "contextlib"),
        (f"{library}/site-packages/queue/train.py", "queue.train"),
    ):
        found = called_from(file, module)
        assert (found.file, found.line) == (file, 2)
