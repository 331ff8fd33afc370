"""How many threads kernels may use here: what the choice of streams depends on."""

from __future__ import annotations

import os

from actorflow.compile.host import usable_cores
from actorflow.settings import Settings
from actors.kernels.native import runtime


def num_threads() -> int:
    """Return the threads that kernels may use: part of what a choice depends on."""
    if runtime.is_on():
        return runtime.num_threads()
    return Settings.from_env(os.environ).threads or usable_cores()
