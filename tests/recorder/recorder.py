"""What jobs compute, written down by hash: so runs of the tests on devices of any lateness compare.

`pytest --record FOLDER` names the file in the environment, so that programs which a test starts
write there, too (`sitecustomize`). A line is one result of a job: outputs of a step or
of an evaluation, variables that were saved or left; it may come several times.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

FILE = "RECORDED_JOBS"
"""The variable of the environment that names the file."""

PATH = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).with_name("site-packages"))])
"""What PYTHONPATH of programs has besides, so that they write as well."""

_written: set[str] = set()


def install(run, patch):
    """Have all runs written down, as long as the patch lasts; `run` is their class."""
    from actorflow.run.run_ports import RunPorts

    begin, save, whole = run.__init__, RunPorts._save, run.whole_variables

    def opened(self, plan, run_spec, context, values, beside=None):
        def heard(what, listener):
            def listen(step, values):
                _write(plan, what, step, values)
                return None if listener is None else listener(step, values)

            return listen

        evaluation = run_spec.evaluation
        if evaluation is not None:
            tell = heard("evaluated", evaluation.on_result)
            evaluation = replace(evaluation, on_result=tell)
        on_step = heard("step", run_spec.on_step)
        run_spec = replace(run_spec, on_step=on_step, evaluation=evaluation)
        begin(self, plan, run_spec, context, values, beside)

    def saved(self, step, arrays):
        _write(self.plan, "saved", step, arrays)
        save(self, step, arrays)

    def left(self):
        variables = whole(self)
        if variables is not None:
            _write(self.plan, "left", int(variables.get("step", 0)), variables)
        return variables

    patch.setattr(run, "__init__", opened)
    patch.setattr(RunPorts, "_save", saved)
    patch.setattr(run, "whole_variables", left)


def _write(plan, what, step, values):
    import numpy as np

    from actorflow.run.devices import devices_of
    from compiler.contract.placement import HOST

    if (file := os.environ.get(FILE)) is None:
        return
    digest, numbers = hashlib.sha256(), {}
    for name, value in sorted(values.items()):
        array = np.asarray(value)
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
        if array.ndim == 0 and what != "saved" and what != "left":
            numbers[name] = float(array)
    line = json.dumps({
        "test": _test(), "job": plan.name, "what": what, "step": step,
        "hash": digest.hexdigest()[:16], "numbers": numbers,
        "is_late": any(device != HOST for device in devices_of(plan)),
        "precision": str(plan.option("precision", "")),
    })  # fmt: skip
    if line not in _written:
        _written.add(line)
        with open(file, "a", encoding="utf-8") as out:
            out.write(line + "\n")


def _test():
    """Return the test that runs; its file while fixtures of many tests are made."""
    name, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    return name.partition("::")[0] if phase == "(setup)" else name


def read(folder):
    """Return the results in the files of a folder, by (test, job, what, step)."""
    found = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            key = (result["test"], result["job"], result["what"], result["step"])
            found.setdefault(key, {})[result["hash"]] = result
    return found


def tests_on_devices(folder):
    """Return the tests, and files of tests, in which a job ran elsewhere than on the host."""
    results = [result for by_hash in read(folder).values() for result in by_hash.values()]
    return {result["test"] for result in results if result["is_late"]}
