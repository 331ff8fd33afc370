"""Native kernels, as the settings ask for them: turned on once, before anything is compiled.

What cannot be had is said in one line of the log, and numpy's kernels run in its place: no C
compiler, a compiler that refuses our runtime, a function or a file of a plan that it refuses.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from actorflow.environment.host import usable_cores
from actorflow.environment.settings import Settings, logger
from actors.kernels.common.files import distrust_of_folder
from actors.kernels.host.catalogue import prepare_plan
from actors.kernels.library import onednn, openblas, runtime, tuning
from actors.kernels.library.toolchain import CompilerError, Toolchain, builds, find_toolchain
from actors.machine.errors import forkable_lock
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.placement import HOST, Device, DeviceKind
from compiler.contract.plan import Plan

NATIVE = ("c.", "onednn.", "openblas.")
"""How the names of native kernels begin."""

# Reentrant: who compiles the plans of all ranks holds it, and takes it again for each class.
_choice = forkable_lock()
"""Guards the choice of kernels, which is one for the process."""

_NO_COMPILER = "no C compiler (cc, gcc or clang) is on the PATH"


def enable_native(settings: Settings, *, deterministic: bool = False) -> bool:
    """Turn native kernels on or off, as the settings say; return whether they are on.

    Which library computes a product is chosen by measured times, unless it is to be deterministic.
    """
    if not settings.native:
        runtime.disable()
        return False
    # At each call: the setting may be another one for the next job of this process.
    tuning.configure(_folder(settings), deterministic)
    threads = settings.threads or usable_cores()
    if runtime.is_enabled() and runtime.pool_threads() == threads:
        return True
    return _turned_on(settings, threads)


def check_threads(count: int | None, where: str) -> None:
    """Raise CompileError for what is no number of threads of this process; None is all of them."""
    settings = Settings.from_env(os.environ)
    most = settings.threads or usable_cores()
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise CompileError(
            f"{where}: expected threads= from 1 to {most}, those of this process"
            f" (ACTORFLOW_THREADS, else the cores that it may use), came {count!r}"
        )
    if not settings.native:
        logger.warning(
            "%s: threads=%d holds for native kernels, which are off here: numpy multiplies"
            " matrices with %s threads",
            where,
            count,
            openblas.num_threads(),
        )


def limited_threads(count: int | None) -> AbstractContextManager[None]:
    """Plan and bind kernels for at most `count` threads on this thread; None for no limit."""
    return nullcontext() if count is None else runtime.at_most_threads(count)


def toolchain_of(settings: Settings) -> Toolchain | None:
    """Return the C compiler, with the folder where the settings keep what it builds."""
    return find_toolchain(os.environ, _trusted(_folder(settings)), logger.warning)


@contextmanager
def kernel_choice_lock(
    settings: Settings, devices: Sequence[Device], *, deterministic: bool
) -> Iterator[bool]:
    """Hold the choice of kernels while a plan for some devices is made; give whether it has native.

    How they are chosen belongs to the process, so plans of several threads are made in turns.
    """
    with _choice:
        is_hosts = takes_host_kernels(devices)
        yield is_hosts and enable_native(settings, deterministic=deterministic)


def takes_host_kernels(devices: Sequence[Device]) -> bool:
    """Whether some device computes with the host's kernels; GPUs alone need no C compiler."""
    return any([device.kind is not DeviceKind.CUDA for device in devices])


def retune(settings: Settings) -> bool:
    """Forget which library was the fastest for which product: compiling measures again.

    Return whether there is anything to measure: native kernels are on.
    """
    with kernel_choice_lock(settings, (HOST,), deterministic=False) as is_on:
        if is_on:
            tuning.retune()
        return is_on


def choices(devices: Sequence[Device]) -> str:
    """Return what the choice among native kernels depends on besides compiler and processor."""
    # "" where nothing is chosen, so a plan for GPUs keeps its key when the host is tuned anew.
    is_chosen = runtime.is_enabled() and takes_host_kernels(devices)
    return f"{tuning.epoch()} {onednn.fingerprint()}" if is_chosen else ""


def has_refusals() -> bool:
    """Whether the compiler refused something: plans of this process may lack native kernels."""
    return runtime.is_enabled() and bool(runtime.refusals())


def is_native(plan: Plan) -> bool:
    """Whether some launch of a plan has a native kernel."""
    return any([x.kernel.startswith(NATIVE) for actor in plan.actors for x in actor.launches])


def compiled(name: str, make: Callable[[], Plan], *, is_run: bool = True) -> Plan:
    """Return the plan that `make` compiles, with all that its launches need built.

    One that is not run here, but shown or simulated, is not built.

    What the compiler refuses is said in a line of the log, with its words, and the plan is made
    again: it has numpy's kernels in place of that.
    """
    with told_while_slow(name, partial(_phase, tuning.num_measured())):
        return _compiled(name, make, is_run=is_run)


def _compiled(name: str, make: Callable[[], Plan], *, is_run: bool) -> Plan:
    num_refusals = -1
    while num_refusals < len(runtime.refusals()):  # every further turn has one refusal more
        num_refusals = len(runtime.refusals())
        try:
            plan = make()
        except CompilerError as error:  # a file that products are measured with
            _say_refused(name, error)
            continue
        if not is_run or _is_built(plan):
            return plan
    raise InternalError(f"plan {name!r}: the C compiler refuses what no kernel asks for")


def build(plan: Plan) -> bool:
    """Build what a plan's launches need; return False where the compiler refuses some of it.

    A line of the log has the compiler's words then.
    """
    with told_while_slow(plan.name, partial(_phase, tuning.num_measured())):
        return _is_built(plan)


def _is_built(plan: Plan) -> bool:
    if not runtime.is_enabled():
        return True
    try:
        # Built at once and not at the first launch, where a refusal could not change the plan any
        # more.
        prepare_plan(plan)
    except CompilerError as error:
        _say_refused(plan.name, error)
        return False
    return True


# Who waits at a terminal or a notebook hears after a second what is done, and every ten seconds.

_SLOW_S, _AGAIN_S = 1.0, 10.0


@contextmanager
def told_while_slow(name: str, phase: Callable[[], str]) -> Iterator[None]:
    """Log what is done for a job where that takes long; where nobody waits, as information."""
    level = logging.WARNING if _is_awaited() else logging.INFO
    if not logger.isEnabledFor(level):
        yield
        return
    is_done = threading.Event()

    def tell() -> None:
        wait_s = _SLOW_S
        while not is_done.wait(wait_s):
            logger.log(level, "job %r: %s", name, phase())
            wait_s = _AGAIN_S

    teller = threading.Thread(target=tell, name="actorflow-slow", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_done.set()
        teller.join()


def _phase(num_measured_before: int) -> str:
    num_measured = tuning.num_measured() - num_measured_before
    if builds.num_files:
        return f"compiling kernels: {builds.num_built} of {builds.num_files} files are built"
    if num_measured:
        return f"planning; which library is fastest was measured for {num_measured} products"
    return "planning, or compiling a kernel"


def _is_awaited() -> bool:
    """Whether somebody looks at what is logged: at a terminal or in a notebook."""
    try:
        return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    except ValueError:  # it is closed
        return False


def _say_refused(name: str, error: CompilerError) -> None:
    logger.warning("plan %r: %s; numpy's kernels run in its place, which is slower", name, error)


def _folder(settings: Settings) -> Path | None:
    return None if settings.cache is None else settings.cache / "native"


def _turned_on(settings: Settings, threads: int) -> bool:
    toolchain = toolchain_of(settings)
    if toolchain is None:
        named = os.environ.get("CC")
        _say_once(
            (f"the C compiler CC={named} does not run" if named else _NO_COMPILER)
            + ": numpy's kernels run, which is slower; 'actorflow doctor' says by how much"
        )
        return False
    try:
        runtime.enable(toolchain, threads)
    except CompilerError as error:
        _say_once(f"{error}; numpy's kernels run, which is slower")
        return False
    return True


def _trusted(folder: Path | None) -> Path | None:
    """Return a folder whose libraries may be run; None where others may put theirs there."""
    why = None if folder is None else distrust_of_folder(folder)
    if why is None:
        return folder
    _say_once(
        f"{why}, or set ACTORFLOW_CACHE to a folder of your own: native kernels that are kept"
        " there are not run; they are built again in every process"
    )
    return None


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)
