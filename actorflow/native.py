"""Native kernels, as the settings ask for them: turned on once, before anything is compiled.

What cannot be had is said in one line of the log, and numpy's kernels run in its place: no C
compiler, a compiler that refuses our runtime, a function of a plan that it refuses.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from actorflow.host import usable_cores
from actorflow.log import logger
from actorflow.settings import Settings
from actors.kernels import catalogue
from actors.kernels.native import runtime
from actors.kernels.native.prepare import prepare_plan
from actors.kernels.native.toolchain import CompilerError, find_toolchain
from compiler.plan import Plan

NATIVE = ("c.", "onednn.", "openblas.")
"""How the names of native kernels begin."""


def ready_native(settings: Settings) -> bool:
    """Turn native kernels on or off, as the settings say; return whether they are on."""
    if not settings.native:
        runtime.turn_off()
        return False
    threads = settings.threads or usable_cores()
    if runtime.is_on() and runtime.num_threads() == threads:
        return True
    return _turned_on(settings.cache, threads)


def build(plan: Plan) -> bool:
    """Build what a plan's launches need; return False where the compiler refuses some of it.

    A line of the log has the compiler's words then. Compiled again, the plan has numpy's kernels in
    place of what was refused.
    """
    if not runtime.is_on():
        return True
    try:
        prepare_plan(plan, catalogue.binders())
    except CompilerError as error:
        logger.warning(
            "plan %r: %s; numpy's kernels run in its place, which is slower", plan.name, error
        )
        return False
    return True


def _turned_on(cache: Path | None, threads: int) -> bool:
    toolchain = find_toolchain(os.environ, None if cache is None else cache / "native")
    if toolchain is None:
        _say_once(
            "no C compiler (cc, gcc or clang) is on the PATH: numpy's kernels run, which is slower;"
            " 'actorflow doctor' says by how much"
        )
        return False
    try:
        runtime.turn_on(toolchain, threads)
    except CompilerError as error:
        _say_once(f"{error}; numpy's kernels run, which is slower")
        return False
    return True


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)
