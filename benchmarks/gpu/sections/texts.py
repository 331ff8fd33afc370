"""All kernel texts of the measured jobs, by NVRTC: what they use, and that none spills.

Needs no GPU; where there is one the machine code stays for the sections that follow.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.calls import KernelText, RunKernel, every_call
from actors.kernels.cuda.kernel import gpu_named
from actors.race.race import check_races
from compiler.contract.errors import ActorflowError
from compiler.contract.plan import Plan
from gpu.jobs import measured_rows, proven_rows
from gpu.opened import GPU, kept_folder
from gpu.planned import bound_launches, device_bytes, plan_of, simulated_s
from gpu.section import Findings, Place, Skipped


def run(found: Findings, place: Place) -> None:
    texts = texts_of(planned(found, is_tiny=place.is_emulated))
    found.metric("texts", len(texts))
    if not nvrtc.is_here():
        raise Skipped("NVRTC is not here")
    arch, folder = gpu_named(GPU).arch, kept_folder()
    began = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        uses = pool.map(lambda text: (text, nvrtc.usage(text, arch, folder)), texts)
        kernels = [(text, name, use) for text, of in uses for name, use in of.items()]
    found.metric("compile_s", time.perf_counter() - began)
    found.metric("kernels", len(kernels))
    found.metric("most_registers", max([use.registers for *_, use in kernels]))
    spilled = sum([use.spilled_bytes for *_, use in kernels])
    found.metric("spilled_bytes", spilled)
    those = [
        f"{text.about}: {use.spilled_bytes} bytes" for text, _, use in kernels if use.spilled_bytes
    ]
    found.check("no kernel spills", not those, "; ".join(those))
    for text, name, use in kernels:
        usage = f"{use.registers} registers, {use.spilled_bytes} spilled, {use.shared_bytes} shared"
        found.facts[f"{text.about}: {name}"] = usage
    found.write()


def planned(found: Findings, *, is_tiny: bool) -> list[Plan]:
    """Return the plans of all jobs that are proven or measured; says how long planning took."""
    plans = []
    rows = (*proven_rows(is_tiny=is_tiny), *measured_rows(is_tiny=is_tiny))
    for row, precision in {(row.name, kind): (row, kind) for row, kind in rows}.values():
        name, began = f"{row.name}_{precision}", time.perf_counter()
        try:
            plans.append(plan_of(row, precision))
        except ActorflowError as error:
            found.check(f"{name} can be planned", False, error)
            continue
        found.metric(f"plan_{name}_s", time.perf_counter() - began)
        found.metric(f"arena_{name}_gib", device_bytes(plans[-1]) / (1 << 30))
        found.metric(f"simulated_{name}_ms", 1e3 * simulated_s(plans[-1]))
        try:
            check_races(plans[-1])
            found.check(f"{name}: no two accesses race", True)
        except ActorflowError as error:
            found.check(f"{name}: no two accesses race", False, error)
    return plans


def texts_of(plans: list[Plan]) -> list[KernelText]:
    """Return every kernel text that launches of these plans run, once."""
    calls = [
        call for plan in plans for bound in bound_launches(plan) for call in every_call(bound.calls)
    ]
    by_text = {call.text.text: call.text for call in calls if isinstance(call, RunKernel)}
    return list(by_text.values())
