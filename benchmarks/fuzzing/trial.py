"""Try mutants in this process, one after another: the child that may die, so that no one else does.

Reads lines "SUBJECT SEED" and answers each with one line of JSON: what became of the mutant.

refused    a typed error, from a check: the file is not run
failed     a typed error of the run itself: a label out of range, a loss that is not finite
equal      it runs, and to the same bits
other      it runs to other bits; then the fields that differ are named in place of the change
wrong      anything else: an untyped error, our own bug
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from dataclasses import fields, is_dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

RAW = 0.25
"""The share of mutants with damaged bytes."""


def main() -> None:
    """Serve until the input ends."""
    from actorflow.settings import Settings
    from compiler.plan import Plan
    from fuzzing import subjects

    folder = Path(sys.argv[1])
    settings = Settings.from_env(os.environ)
    files: dict[str, tuple[bytes, dict[str, bytes]]] = {}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints does not answer
    for line in sys.stdin:
        name, seed = line.split()
        if name not in files:
            data = (folder / f"{name}.plan").read_bytes()
            files[name] = data, subjects.results(name, Plan.from_bytes(data), settings)
        data, expected = files[name]
        answers.write(json.dumps(tried(name, data, int(seed), expected, settings)) + "\n")


def mutant(name: str, data: bytes, seed: int) -> tuple[bytes, str]:
    """Return a mutant of a plan, the same for the same seed, and what was changed."""
    from fuzzing import mutants

    rng = random.Random(f"{name} {seed}")
    return (mutants.raw if rng.random() < RAW else mutants.rehashed)(data, rng)


def tried(name: str, data: bytes, seed: int, expected: dict[str, bytes], settings) -> list[str]:
    """Return the outcome of one mutant, what was changed, and a word on the error."""
    from actors.errors import ActorFailed
    from compiler.errors import ActorflowError, InternalError
    from compiler.plan import Plan
    from fuzzing import subjects

    changed, what = mutant(name, data, seed)
    stage = "refused"
    try:
        plan = Plan.from_bytes(changed, "mutant.plan")
        from actorflow.proof.prove import prove

        prove(plan)
        stage = "failed"
        found = subjects.results(name, plan, settings)
    except InternalError:
        return ["wrong", what, traceback.format_exc()]
    except ActorFailed as error:
        is_typed = isinstance(error.__cause__, (ActorflowError, IndexError))
        return ["failed" if is_typed else "wrong", what, traceback.format_exc()]
    except ActorflowError as error:
        return [stage, what, f"{type(error).__name__}: {error}"]
    except Exception:
        return ["wrong", what, traceback.format_exc()]
    if found == expected:
        return ["equal", what, ""]
    return ["other", "; ".join(sorted(differences(Plan.from_bytes(data), plan, ""))), what]


def differences(one, other, way: str) -> set[str]:
    """Return the fields in which two plans differ, without the places in tables."""
    if is_dataclass(one) and type(one) is type(other):
        found: set[str] = set()
        for field in fields(one):
            step = f"{way}.{field.name}" if way else field.name
            found |= differences(getattr(one, field.name), getattr(other, field.name), step)
        return found
    is_table = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)
    if is_table and any([is_dataclass(item) for item in one]):
        pairs = zip(one, other, strict=True)
        return {found for a, b in pairs for found in differences(a, b, way)}
    is_same = one == other and repr(one) == repr(other)
    return set() if is_same else {way}


if __name__ == "__main__":
    main()
