"""The same jobs in torch at its best, after their losses were found to be ours.

torch has its batches on the GPU before the clock starts; ours are copied in.
"""

from __future__ import annotations

import time
from statistics import median

from rows.row import Row

from gpu.jobs import measured_rows
from gpu.section import Findings, Place, Skipped

TURN_S, TURNS = 1.0, 3
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
VARIANTS = {
    "torch": (("eager", ("tiny", "gpt2-b1", "gpt2-b8", "gpt2-b64", "bert-base")),),
    # What matters most comes first: each takes torch half a minute to compile.
    "compile": (
        ("reduce-overhead", ("tiny",)),
        ("default", ("gpt2-b64",)),
        ("reduce-overhead", ("gpt2-b1",)),
        ("default", ("bert-base", "tiny")),
        ("reduce-overhead", ("gpt2-b8",)),
    ),
}


def run(found: Findings, place: Place) -> None:
    try:
        import torch
        from engines.torch_engine import Torch
    except ImportError as error:
        raise Skipped(f"torch is not here: {error}") from error
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU")
    found.fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    rows = {row.name: (row, precision) for row, precision in measured_rows(is_tiny=False)}
    engine = Torch()
    for variant, names in VARIANTS[place.name]:
        for name in names:
            row, precision = rows[name]
            try:
                _measure(found, place, engine, row, precision, variant)
            except Exception as error:  # a rival's failure is no failure of ours
                found.fact(f"{name} {variant}", f"{type(error).__name__}: {error}"[:300])
            torch.compiler.reset()
            torch.cuda.empty_cache()


def _measure(found: Findings, place: Place, engine, row: Row, precision: str, variant: str) -> None:
    import torch

    name = row.name if variant == "eager" else f"{row.name}_{variant}"
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    session = engine.prepare(row, precision, variant, "cuda")
    ours = place.told(f"losses-{row.name}")
    losses = [session.step() for _ in range(5)]
    found.metric(f"{name}_first_steps_s", time.perf_counter() - began)
    found.fact(name, session.settings)
    if ours is not None:
        pairs = zip(losses, ours, strict=True)
        apart = max([abs(a - b) / abs(b) for a, b in pairs])
        found.within(f"{name}: losses of 5 steps by ours", apart, TOLERANCE[precision])
        if not apart <= TOLERANCE[precision]:
            return
    step_s = _seconds(session)
    found.metric(f"{name}_{row.item}_s", row.items / step_s)
    found.metric(f"{name}_ms", 1e3 * step_s)
    if row.name == "tiny":
        found.metric(f"{name}_steps_s", 1 / step_s)
    peak = torch.cuda.max_memory_allocated()
    found.metric(f"{name}_peak_gib", peak / (1 << 30))
    our_step = place.told(f"step-{row.name}")
    if our_step is not None:
        found.metric(f"{name}_ours_is_faster", step_s / our_step["seconds"])
        found.metric(f"{name}_ours_takes_of_memory", our_step["bytes"] / peak)


def _seconds(session) -> float:
    session.run(3)
    began = time.perf_counter()
    session.run(3)
    count = max(2, int(TURN_S / max((time.perf_counter() - began) / 3, 1e-6) / TURNS))
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        session.run(count)
        times.append((time.perf_counter() - began) / count)
    return median(times)
