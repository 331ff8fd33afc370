"""Try calls in this process, group after group: the child that may die, so that no one else does.

Reads lines of JSON, a list of [kind, name, seed], and answers each with one line: a list with the
outcome, the cause and words of each call, see `OUTCOMES`.
"""

# ruff: noqa: E402  # the folder is put on the path first
from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np

import actorflow as af
from actorflow import functional, nn
from actorflow.data import spec_of
from actorflow.options.run_spec import PlanOptions
from actorflow.trace.job_graph import trace_job
from actors.machine.errors import ActorFailed
from fuzzing import call_oracle
from fuzzing.calls import Call, Fed, drawn

OUTCOMES = {
    "result": "it runs, and nothing disagrees",
    "refused": "a typed error that names the line, or Python's own of a wrong number of arguments",
    "failed": "a typed error of the run: an id out of range",
    "untyped": "another error",
    "nowhere": "a typed error that does not name the line",
    "other": "it runs, and has another dtype, shape or values than torch or numpy",
}
BAD = ("untyped", "nowhere", "other")

MEMORY_BYTES = 5 << 30
"""What a child may map; what asks for more and was not refused gets a MemoryError: a fault."""

HERE = re.compile(r"call(s|_trial)\.py:[0-9]+")
"""A line of whoever calls, as errors name it."""

_OF_CALLS = re.compile(
    r"missing|takes|expected [0-9]+ arguments|got an unexpected|got multiple|too many|positional"
)

_OF_VALUES = (IndexError, np.linalg.LinAlgError)
"""What an op raises for values of its operands: an id out of range, a matrix without a factor."""

_OF_USER = ("call_trial.py", "calls.py")
_HANDING_ON = (
    "literals.py",
    "habits.py",
    "module.py",
    "tensor.py",
    "arguments.py",
    "op_math.py",
    "option_values.py",
    "function_layers.py",
)
_COUNTING = {("shape.py", "split")}
"""Functions of two forms (`af.split(0)` is a layout), which count their arguments themselves."""

Outcome = tuple[str, str, str]


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints does not answer
    warnings.simplefilter("error")
    for line in sys.stdin:
        calls = json.loads(line)
        answers.write(json.dumps(tried([drawn(*one) for one in calls])) + "\n")


def tried(calls: list[Call]) -> list[Outcome]:
    """Return what becomes of calls that are traced in one job, each alone where that fails."""
    outcomes: dict[int, Outcome] = {}
    model, layers = nn.Module(), {}
    for place, call in enumerate(calls):
        if call.kind == "layer":
            try:
                layers[place] = _made(call)
                setattr(model, f"layer{place}", layers[place])
            except Exception as error:
                outcomes[place] = judged(error)
    todo = [place for place in range(len(calls)) if place not in outcomes]
    batch = {
        f"{place}.{at}": fed.array for place in todo for at, fed in enumerate(_fed(calls[place]))
    }
    batch["none"] = np.zeros(1, np.float32)
    results: dict[int, Any] = {}

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = {"none": batch["none"]}
        for place in todo:
            try:
                tensors = [batch[f"{place}.{at}"] for at in range(len(_fed(calls[place])))]
                returned = _called(calls[place], tensors, layers.get(place))
                results[place] = returned
                named = {f"{place} {i}": t for i, t in enumerate(_tensors(returned))}
                named |= _gradients(place, named, tensors)
                outputs |= named
            except Exception as error:
                outcomes[place] = judged(error)
        return outputs

    arrays = None
    try:
        arrays = _stepped(compute, model, batch)
    except Exception as error:
        if len(calls) == 1:
            return [judged(error, is_run=True)]
    if arrays is None:  # not while the error holds on to what the job had
        half = len(calls) // 2
        return [*tried(calls[:half]), *tried(calls[half:])]
    for place in todo:
        if place not in outcomes:
            pairs = enumerate(_tensors(results[place]))
            got = [np.asarray(arrays[f"{place} {i}"], t.dtype.value) for i, t in pairs]
            words = call_oracle.disagreement(calls[place], got)
            cause = f"{calls[place].kind} {calls[place].name}: {words.partition(':')[0]}"
            outcomes[place] = ("other", cause, f"{words}\n{calls[place]}") if words else _RESULT
    return [_told(outcomes[place], call) for place, call in enumerate(calls)]


def _stepped(compute: Any, model: nn.Module, batch: dict[str, np.ndarray]) -> Any:
    """Run one step of a job: traced once, where `Job.step` would look at all that it may read."""
    job, spec = af.job(train=False)(compute), spec_of(batch, "the calls")
    graph = trace_job(job.name, compute, job.options, model, spec, job.devices)
    job_spec = job._spec(model, spec, PlanOptions(), metrics_every=1, graph=graph)
    with contextlib.closing(af.Runner(job._plan(job_spec, None, model), seed=1)) as runner:
        return runner.step(batch)


_RESULT = ("result", "", "")


def _told(outcome: Outcome, call: Call) -> Outcome:
    kind, cause, words = outcome
    return (kind, cause, f"{call!r}\n{words}") if kind in BAD else outcome


def _made(call: Call) -> nn.Module:
    args, kwargs = call.made_with
    filled = _filling({})
    if call.name in ("Sequential", "ModuleList", "ModuleDict"):
        args = [nn.Identity() if isinstance(a, Fed) else a for a in args]
    return getattr(nn, call.name)(
        *[filled(a) for a in args], **{k: filled(v) for k, v in kwargs.items()}
    )


def _called(call: Call, tensors: list[Any], layer: Any) -> Any:
    filled = _filling(dict(zip([id(f) for f in _fed(call)], tensors, strict=True)))
    args = [filled(a) for a in call.args]
    kwargs = {k: filled(v) for k, v in call.kwargs.items()}
    if call.kind == "function":
        return getattr(functional, call.name)(*args, **kwargs)
    if call.kind == "layer":
        return layer(*args, **kwargs)
    return getattr(args[0], call.name)(*args[1:], **kwargs)


def _filling(tensors: dict[int, Any]) -> Any:
    def filled(value: Any) -> Any:
        if isinstance(value, Fed):
            return tensors.get(id(value), value.array)
        if isinstance(value, (list, tuple)):
            return type(value)([filled(item) for item in value])
        return {k: filled(v) for k, v in value.items()} if isinstance(value, dict) else value

    return filled


def _fed(value: Any) -> list[Fed]:
    """Return what is fed among the arguments of a call, in order."""
    if isinstance(value, Fed):
        return [value]
    if isinstance(value, Call):
        return _fed([*value.args, *value.kwargs.values()])
    items = value.values() if isinstance(value, dict) else value
    return (
        [f for item in items for f in _fed(item)] if isinstance(value, (list, tuple, dict)) else []
    )


def _tensors(made: Any) -> list[Any]:
    """Return the tensors of a result, of any form."""
    if isinstance(made, af.Tensor):
        return [made]
    items = made.values() if isinstance(made, dict) else made
    is_nested = isinstance(made, (list, tuple, dict))
    return [t for item in items for t in _tensors(item)] if is_nested else []


def _gradients(place: int, made: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    floats = [t for t in made.values() if t.dtype.is_float]
    operands = [t for t in tensors if t.dtype.is_float]
    if not floats or not operands:
        return {}
    total = sum([t.to("float32").sum() for t in floats[1:]], floats[0].to("float32").sum())
    try:
        slopes = af.grad(total, operands, allow_unused=True)
    except af.CompileError as error:
        if HERE.search(str(error)):  # what has no gradient says so
            return {}
        raise
    return {f"{place} gradient {i}": s for i, s in enumerate(slopes) if s is not None}


def judged(error: Exception, *, is_run: bool = False) -> Outcome:
    """Return the outcome that an error is, with its cause: where in the product it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((f for f in reversed(frames) if not f.filename.startswith(sys.prefix)), frames[-1])
    where = f"{Path(inner.filename).name}:{inner.name}"
    cause = f"{type(error).__name__} in {where}"
    is_chained = isinstance(error, ActorFailed)
    words = "".join(traceback.format_exception(error, chain=is_chained))[-2500:]
    root = error.__cause__ if isinstance(error, ActorFailed) else error
    is_typed = isinstance(root, af.ActorflowError) and not isinstance(root, af.InternalError)
    if is_run and isinstance(root, _OF_VALUES) and isinstance(error, ActorFailed):
        is_typed = True
    if is_typed:
        if HERE.search(str(error)) or isinstance(error, af.OutOfMemory):  # which names the tensor
            return ("failed" if is_run else "refused", cause, str(error))
        return ("nowhere", cause, words)
    if Path(frames[-1].filename).name == "calls.py":  # a function that was given does not fit
        return ("refused", cause, str(error))
    if isinstance(error, TypeError) and _OF_CALLS.search(str(error)) and _is_of_call(frames):
        return ("refused", cause, str(error))
    return ("untyped", cause, words)


def _is_of_call(frames: traceback.StackSummary) -> bool:
    """Whether the line that raised is the user's, or one of ours that hands a call on or counts."""
    file = Path(frames[-1].filename).name
    return file in (*_OF_USER, *_HANDING_ON) or (file, frames[-1].name) in _COUNTING


if __name__ == "__main__":
    main()
