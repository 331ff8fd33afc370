"""Try mutants in this process, one after another: the child that may die, so that no one else does.

Reads lines of JSON [subject, seed] and answers each with one: what became of the mutant.

refused    a typed error, from a check: the file is not run
failed     a typed error of the run itself: a label out of range, a loss that is not finite
equal      it runs, and to the same bits
other      it runs to other bits, and so does the plan it came from with just its fields `SAYS_WHAT`
changed    it runs to other bits for another reason
wrong      anything else: an untyped error, our own bug
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

SAYS_WHAT = {
    "actors.launches.attrs": "the numbers of an op: a scale, a decay, the program of a group",
    "actors.launches.kernel": "who computes an op: another kernel rounds in another way",
    "actors.launches.op": "another op of the same types, with a kernel that computes it",
    "constants.data": "the numbers of the program",
    "variables.init": "where training starts from",
    "variables.name": "first values are drawn by name, and results told by it",
    "fields.name": "which array of a batch is fed where, and what an output is called",
    "fields rows": "which outputs are told; a batch's and a snapshot's are all needed",
    "options": "how many batches a step has, and how often it is told",
}
"""Fields that say what is computed. All others say how, and may change nothing."""

RAW = 0.25
"""The share of mutants with damaged bytes."""


def main() -> None:
    """Serve until the input ends."""
    from actorflow.environment.settings import Settings
    from compiler.contract.plan import Plan
    from fuzzing import subjects

    folder = Path(sys.argv[1])
    settings = Settings.from_env(os.environ)
    files: dict[str, tuple[bytes, dict[str, bytes]]] = {}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints does not answer
    for line in sys.stdin:
        name, seed = json.loads(line)
        if name not in files:
            data = (folder / f"{name}.plan").read_bytes()
            files[name] = data, subjects.results(name, Plan.from_bytes(data), settings)
        data, expected = files[name]
        answers.write(json.dumps(tried(name, data, seed, expected, settings)) + "\n")


def mutant(name: str, data: bytes, seed: int) -> tuple[bytes, str]:
    """Return a mutant of a plan, the same for the same seed, and what was changed."""
    from fuzzing import mutants

    rng = random.Random(f"{name} {seed}")
    return (mutants.raw if rng.random() < RAW else mutants.rehashed)(data, rng)


def tried(name: str, data: bytes, seed: int, expected: dict[str, bytes], settings) -> list[str]:
    """Return the outcome of one mutant, what was changed, and a word on the error."""
    from actors.machine.errors import ActorFailed
    from compiler.contract.errors import ActorflowError, InternalError
    from compiler.contract.plan import Plan
    from fuzzing import subjects

    mutated, what = mutant(name, data, seed)
    stage = "refused"
    try:
        plan = Plan.from_bytes(mutated, "mutant.plan")
        from actorflow.compile.prove import prove

        prove(plan)
        stage = "failed"
        bits = subjects.results(name, plan, settings)
    except InternalError:
        return ["wrong", what, traceback.format_exc()]
    except ActorFailed as error:
        is_typed = isinstance(error.__cause__, (ActorflowError, IndexError))
        return ["failed" if is_typed else "wrong", what, traceback.format_exc()]
    except ActorflowError as error:
        return [stage, what, f"{type(error).__name__}: {error}"]
    except Exception:
        return ["wrong", what, traceback.format_exc()]
    if bits == expected:
        return ["equal", what, ""]
    original = Plan.from_bytes(data)
    plan = in_order_of(original, plan)
    for says in (SAYS_WHAT, {k: v for k, v in SAYS_WHAT.items() if not k.startswith("actors")}):
        try:
            if subjects.results(name, taking(original, plan, "", says), settings) == bits:
                return ["other", what, ""]
        except ActorflowError:
            continue
    return ["changed", what, ""]


def in_order_of(one, other):
    """Return the other plan with its variables in the order of this one: it has no meaning."""
    places = {variable.name: place for place, variable in enumerate(one.variables)}
    if sorted(places) != sorted([variable.name for variable in other.variables]):
        return other
    ordered = sorted(other.variables, key=lambda variable: places[variable.name])
    return replace(other, variables=tuple(ordered))


def taking(one, other, way: str, says):
    """Return a plan with those fields of another one whose ways are in `says`."""
    if way in says:
        return other
    if is_dataclass(one):
        steps = {f.name: f"{way}.{f.name}" if way else f.name for f in fields(one) if f.init}
        values = {n: (getattr(one, n), getattr(other, n), step) for n, step in steps.items()}
        return replace(one, **{n: taking(*value, says) for n, value in values.items()})
    is_table = isinstance(one, tuple) and len(one) == len(other)
    if is_table and any([is_dataclass(item) for item in one]):
        return tuple([taking(a, b, way, says) for a, b in zip(one, other, strict=True)])
    return other if isinstance(one, tuple) and f"{way} rows" in says else one


if __name__ == "__main__":
    main()
