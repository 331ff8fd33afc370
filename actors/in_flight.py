"""What a thread of the loop is running at this moment, as the thread itself noted it.

A thread that runs chains has one `FiringNote` and writes in it, once per firing, references that it
has anyway; that is all that being watched costs until somebody asks, which is when a run stalls or
a launch fails. Frames of the thread are read only for the calls of user code below a chain, never
for what the loop itself knows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from types import CodeType

from actors.protocol import Chain, Launch

Job = tuple[int, Chain]
"""An actor with the chain of one of its phases; built once per run, not per firing."""

_INNERMOST = 8
_LIBRARIES = (str(Path(threading.__file__).parent), "<frozen ")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launch that is running.

    `launch` is its number in the plan's chain, None where the chain does not tell. `since_ns` is
    when its chain began, on the loop's clock. `stack` are the innermost calls of the thread below
    the chain, as "file:line in function", innermost first; a launch in C has none.
    """

    actor: int
    launch: int | None
    since_ns: int
    stack: tuple[str, ...]

    @property
    def where(self) -> str:
        """The innermost call outside of libraries, which is the one that its author knows."""
        own = [c for c in self.stack if not c.startswith(_LIBRARIES) and "site-packages" not in c]
        return (*own, *self.stack, "")[0]


class FiringNote:
    """What a thread runs: `job` (None while it waits), `launches` (the iterator over its chain).

    Its thread writes the attributes; `since_ns` is when the chain began. Any thread may look.

    Args:
        num_launches: by actor, as many as a chain of the plan has; 1 for a port.
    """

    __slots__ = ("_num_launches", "job", "launches", "since_ns")

    def __init__(self, num_launches: Sequence[int]) -> None:
        self._num_launches = num_launches
        self.job: Job | None = None
        self.launches: Iterator[Launch] | None = None
        self.since_ns = 0

    def clear(self) -> None:
        """Note that nothing runs, and let go of the chain."""
        self.job = self.launches = None

    def launch(self) -> int | None:
        """Return the number of the launch that runs or has failed, or None where it is unknown."""
        job, launches = self.job, self.launches
        if job is None or launches is None:
            return None
        actor, chain = job
        item = max(0, len(chain) - length_hint(launches) - 1)
        return launch_number(chain, item, self._num_launches[actor])

    def look(self, thread: threading.Thread, code: CodeType) -> InFlight | None:
        """Return what the thread runs, with its calls below the function with this code, or None.

        The thread goes on meanwhile: the answer is exact for one that is stuck.
        """
        job = self.job
        if job is None:
            return None
        return InFlight(job[0], self.launch(), self.since_ns, _calls_below(thread, code))


def _calls_below(thread: threading.Thread, code: CodeType) -> tuple[str, ...]:
    """Return the innermost calls of a thread down to a function; () where it is not in it."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls: list[str] = []
    while frame is not None and frame.f_code is not code:
        calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return () if frame is None else tuple(calls[:_INNERMOST])


def launch_number(chain: Chain, item: int, num_launches: int) -> int | None:
    """Return the number in the plan of the launch that runs, or failed, in an item of a chain.

    A device may make one item of several launches: it says how many they are (`num_launches`) and
    which one runs (`running`). None where items do not account for all launches of the plan, or the
    one that runs does not know. O(items); only failures and stalls ask.
    """
    counts = [getattr(launch, "num_launches", 1) for launch in chain]
    if sum(counts) != num_launches or item >= len(chain):
        return None
    running: int | None = getattr(chain[item], "running", 0)
    return None if running is None else sum(counts[:item]) + running
