"""A child that is forked in a function of the user's, which a run calls, and then leaves it."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import numpy as np
import actorflow as af
from actorflow import nn

where, how = sys.argv[1:]

def fork():
    pid = os.fork()
    if pid:  # the parent goes on when the child has ended
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    elif how == "raise":
        raise RuntimeError("of the child")
    elif how == "end":
        raise StopIteration
    elif how != "return":
        sys.exit(eval(how))

class Data(af.data.ArraySource):
    given = 0

    def next_into(self, out):
        self.given += 1
        if where == "source" and self.given == 3:
            fork()
        return super().next_into(out)

class Plain:
    inner = af.data.ArraySource({"x": np.ones((32, 3), np.float32)}, batch=8)
    given = 0

    def __next__(self):
        self.given += 1
        if self.given == 3:
            fork()
        return next(self.inner)

    def __getattr__(self, name):
        if name.startswith("next_"):
            raise AttributeError(name)
        return getattr(self.inner, name)

data = Plain() if where == "next" else Data({"x": np.ones((32, 3), np.float32)}, batch=8)
on_step = (lambda step, _: step == 3 and fork()) if where == "on_step" else None
train = af.job(lambda m, b: (m(b.x) ** 2).mean(), optimizer=af.optim.SGD(0.1))
print(train.fit(nn.Linear(3, 2), data, steps=6, progress=False, on_step=on_step).last_step)
"""

ENDS = {
    ("source", "0"): (0, ""),
    ("source", "3"): (3, ""),
    ("source", "None"): (0, ""),
    ("source", "'no'"): (1, "no"),
    ("source", "raise"): (1, "RuntimeError: of the child"),
    ("source", "return"): (1, "returned from it: the run and its threads are in process"),
    ("source", "end"): (1, "returned from it"),
    ("next", "raise"): (1, "RuntimeError: of the child"),
    ("next", "return"): (1, "returned from it"),
    ("on_step", "4"): (4, ""),
    ("on_step", "raise"): (1, "RuntimeError: of the child"),
    ("on_step", "return"): (1, "returned from it"),
}


@pytest.mark.host("the script is a process of its own")
@pytest.mark.thinned(3)
@pytest.mark.parametrize(("how", "wanted"), ENDS.items(), ids=[" ".join(row) for row in ENDS])
def test_a_child_ends_and_its_parent_trains_on(tmp_path, how, wanted):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "script.py"), *how]
    end = subprocess.run(command, capture_output=True, text=True, timeout=100)
    status, said = wanted
    assert (end.returncode, end.stdout) == (0, f"child {status}\n6\n"), end.stderr
    assert said in end.stderr
    assert bool(end.stderr) == bool(said)
