"""Write docs/ops.md: what functions take, whether they have gradients, and what computes them.

    python docs/write_ops.py [--check]

Nothing in the page is said by hand: the functions are those of the cases in tests/oracle, called
here with one of their argument sets. A type is listed where a job that calls the function with it
compiles, a gradient where `af.grad` finds one, and a kernel where the plan for a device names it.
`--check` writes nothing and fails where the page is another one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ops.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "shared")]
os.environ |= {"ACTORFLOW_NATIVE": "1", "ACTORFLOW_CACHE": "off", "ACTORFLOW_CUDNN": "0"}
os.environ["ACTORFLOW_THREADS"] = "2"  # whatever this machine has
os.environ["ACTORFLOW_LOG"] = "error"  # lambdas of cases have no names

import numpy as np  # noqa: E402

import actorflow as af  # noqa: E402  # found beside this folder
from actorflow import nn  # noqa: E402
from actorflow.functional import __all__ as functions  # noqa: E402
from compiler.contract.errors import ActorflowError  # noqa: E402
from compiler.contract.types import DType, TensorType  # noqa: E402

FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
OTHERS = (DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8, DType.BOOL)
SHORT = {d: d.value.replace("float", "f").replace("uint", "u").replace("int", "i") for d in DType}


def cases() -> Iterator[tuple[str, Any]]:
    """Yield (subject, case) of all files of cases."""
    for file in sorted((ROOT / "tests" / "oracle").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case in getattr(module, "CASES", ()):
            given = [a for arrays in getattr(case, "sets", ()) for a in arrays]
            if given and all([isinstance(a, np.ndarray) for a in given]):
                yield file.stem[5:], case


def types_of(case: Any, dtype: DType | None) -> dict[str, TensorType]:
    """Return a batch of one argument set; its floats are of `dtype`, or as they are."""
    sizes = [sum([a.size for a in arrays]) for arrays in case.sets]
    arrays = case.sets[max(range(len(sizes)), key=lambda i: (sizes[i] < 2000) * sizes[i])]
    return {
        f"x{i}": TensorType(
            dtype if dtype and a.dtype.kind == "f" else DType(a.dtype.name), a.shape
        )
        for i, a in enumerate(arrays)
    }


def job_of(
    case: Any, *, has_gradient: bool = False, is_short: bool = False, **options: Any
) -> af.Job:
    """Return a job that calls the function, or differentiates the sum of what it returns.

    No batch or output has bfloat16, which numpy does not know: with `is_short` the job casts.
    """

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        args = [batch[f"x{i}"] for i in range(len(case.sets[0]))]
        if is_short:
            args = [t.to(DType.BFLOAT16) if t.dtype.is_float else t for t in args]
        made = case.ours(*args)
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        if not has_gradient:
            return {f"y{i}": t.to("float32") if is_short else t for i, t in enumerate(made)}
        total = sum([t.sum() for t in made if t.dtype.is_float][1:], made[0].sum())
        wanted = [t for t in args if t.dtype.is_float]
        found = af.grad(total, wanted, allow_unused=True)
        return {f"g{i}": t for i, t in enumerate(found) if t is not None}

    return af.job(train=False, **options)(compute)


def holds(job: af.Job, spec: dict[str, TensorType]) -> bool:
    """Whether a job can be traced with a batch of these types."""
    try:
        job.graph(nn.Module(), spec)
    except (ActorflowError, TypeError, ValueError, AttributeError):
        return False
    return True


def kernels(case: Any, **options: Any) -> str:
    """Return the kernels of the plan for a device; a dash where there is none."""
    try:
        plan = job_of(case, **options).compile(nn.Module(), types_of(case, DType.FLOAT32))
    except ActorflowError:
        return "-"
    names = [launch.kernel for actor in plan.actors for launch in actor.launches]
    own = [name.partition(":")[0] for name in names]
    kept = [n for n in own if n.rpartition(".")[2] not in ("copy", "copy_to", "copy_block")]
    return ", ".join(sorted(dict.fromkeys(kept))) or "copies"


def row(case: Any) -> str:
    """Return the line of a case."""
    job, short = job_of(case), job_of(case, is_short=True)
    held = [
        d
        for d in (*FLOATS, *OTHERS)
        if (
            holds(short, types_of(case, None))
            if d is DType.BFLOAT16
            else holds(job, types_of(case, d))
        )
    ]
    has_floats = any([a.dtype.kind == "f" for a in case.sets[0]])
    shown = " ".join([SHORT[d] for d in held]) if has_floats else "as given"
    slope = holds(job_of(case, has_gradient=True), types_of(case, DType.FLOAT32))
    gradient = "yes" if case.has_gradient and has_floats and slope else "-"
    # Libraries for products are chosen by a fixed rule: which one is fastest differs by machine.
    host = kernels(case, deterministic=True)
    gpu = kernels(case, device="cuda", gpu="h200")
    return f"| {case.name} | {shown} | {gradient} | {host} | {gpu} |"


def page() -> str:
    """Return the text of the page."""
    lines = [
        "# Functions: types, gradients, kernels",
        "",
        "This page is for users who look up whether a function supports a dtype, a gradient or a"
        " device. `python docs/write_ops.py` writes it from the cases that are compared with torch"
        " (tests/oracle). Types are those with which a job compiles in place of the floats of a"
        " case. Kernels are those of plans in float32, for the host with a C compiler"
        " (`deterministic=True`, because the fastest library is measured otherwise) and for an"
        " H200. numpy's kernels compute every function, too. `actorflow ops` prints the attributes"
        " of each op.",
    ]
    subject = ""
    for name, case in cases():
        if name != subject:
            subject = name
            title = name.replace("_", " ").capitalize()
            lines += [
                "",
                f"## {title}",
                "",
                "| | types | gradient | host | CUDA |",
                "|---|---|---|---|---|",
            ]
        lines.append(row(case))
    lines += ["", f"Functions of `af`: {', '.join(f'`{n}`' for n in sorted(functions))}.", ""]
    return "\n".join(lines)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is another one")
    options = parser.parse_args()
    text = page()
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
