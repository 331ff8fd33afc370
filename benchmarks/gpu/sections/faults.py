"""What goes wrong is told: too little memory before the first step, a bad id, a bad address."""

from __future__ import annotations

from unittest import mock

import numpy as np
from engines.actorflow_models import FAMILIES, Rounds, job_of
from rows.all_rows import find_row
from rows.gpt2 import gpt2_row
from rows.row import Row

from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.kernels.cuda.calls import KernelText, RunKernel
from actors.kernels.cuda.kernel import CudaKernel
from actors.machine.protocol import DeviceFault
from compiler.contract.errors import OutOfMemory
from gpu.jobs import TINY
from gpu.opened import GPU, driver_class, open_device, open_driver
from gpu.section import Findings, Place

ROW, PRECISION = gpt2_row("tiny-gpt2", TINY), "bf16"

_SPARE_BYTES = 1 << 30
"""Half of what the plan wants that has to do with so much."""
_WILD = KernelText.of(
    "wild",
    "typedef struct { af_word w[1]; } NAME_arguments;\n"
    "AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) { *(int32_t *)arguments.w[0].p = 1; }\n",
    ("NAME",),
    "a write to nobody's memory",
    has_exchanges=False,
)


class Wild:
    """A kernel that writes where nothing is."""

    name, op = "wild", "wild"

    def plan(self, attrs, inputs, outputs):
        calls = (RunKernel(_WILD, _WILD.kernels[0], 1, 32, (16,)),)
        return KernelPlan(KernelNeeds(), lambda *operands: calls)


def run(found: Findings, place: Place) -> None:
    with found.part("too little memory"):
        _full(found, place)
    with found.part("a bad id"):
        _bad_id(found)
    if not place.is_emulated:  # there it would be the end of this process
        with found.part("a bad address"):
            _bad_address(found, place)


def _full(found: Findings, place: Place) -> None:
    """Let there be less memory than a plan takes."""
    losses: list[float] = []
    if place.is_emulated:
        with mock.patch.object(driver_class(place), "free_bytes", return_value=4096):
            error = _error_of(ROW, losses)
    else:
        driver = open_driver(place)
        filler = driver.allocate(driver.free_bytes() - _SPARE_BYTES)
        error = _error_of(find_row("gpt2-b1"), losses)
        driver.free(filler)
    is_told = isinstance(error, OutOfMemory) and "are free" in str(error)
    found.check("too little memory is told before the first step", is_told and not losses, error)


def _bad_id(found: Findings) -> None:
    """Let an id of the fourth batch lie outside of the table, here and on the host."""
    losses: dict[str, list[float]] = {"host": [], "cuda": []}
    words = {}
    for device, device_losses in losses.items():
        words[device] = _index_error(_error_of(ROW, device_losses, 3, device))
    found.check("a bad id ends a run in the host's words", words["host"] == words["cuda"] != "",
                words["cuda"], words["host"])  # fmt: skip
    found.check("no loss of such a step comes out", len(losses["cuda"]) == 3, len(losses["cuda"]))


def _error_of(
    row: Row, losses: list[float], bad_step: int | None = None, device: str = "cuda"
) -> BaseException | None:
    """Return the error that five steps end with; step `bad_step` has an id that means nothing."""
    model, loss = FAMILIES[row.family](row)
    model.load(row.weights())
    batches = [
        {n: a.copy() for n, a in batch.items()} for batch in [*row.batches(), *row.batches()]
    ]
    if bad_step is not None:
        batches[bad_step]["x"][-1, -1] = row.sizes["vocab"] + 7
    options = {"device": device} | ({"gpu": GPU} if device == "cuda" else {})
    try:
        job_of(row, PRECISION, loss, **options).fit(
            model, Rounds(batches), steps=5, progress=False,
            on_step=lambda step, metrics: losses.append(float(np.asarray(metrics["loss"]))),
        )  # fmt: skip
    except Exception as error:
        return error
    return None


def _index_error(error: BaseException | None) -> str:
    """Return the words of the IndexError that is at the bottom of an error."""
    while error is not None and not isinstance(error, IndexError):
        error = error.__cause__
    return "" if error is None else str(error)


def _bad_address(found: Findings, place: Place) -> None:
    """Write where nothing is; this process can do nothing on the GPU afterwards."""
    kernel: CudaKernel = Wild()
    device = open_device(place, more={"wild": kernel})
    stream = device.make_stream("wild")
    (chain,) = device.bind_chain(stream, (device.bind("wild", {}, (), (), None, ()),))
    faults = []
    for _ in range(2):
        try:
            chain()
            device.synchronize()
        except DeviceFault as fault:
            faults.append(fault)
    words = str(faults[0]) if faults else "no fault"
    found.check("a bad address is a fault of the device", "addressed memory" in words, words)
    found.check("every later call says so too", len(faults) == 2, len(faults), 2)
