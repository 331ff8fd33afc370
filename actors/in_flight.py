"""What a thread of the loop is running at this moment, read from its frames.

The loop notes nothing for this, so it costs nothing until somebody asks, which is when a run
stalls. A frame shows its locals on demand (`sys._current_frames`); the two functions that run
chains keep theirs under the same names: `actor` (`NOBODY` while they wait), `chain`, `launches`
(the iterator over it) and `since`.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from actors.protocol import Chain

NOBODY = -1
"""The actor of a thread that waits."""

_INNERMOST = 8
_LIBRARIES = (str(Path(threading.__file__).parent), "<frozen ")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launch that is running.

    `since_ns` is when its chain began, on the loop's clock. `stack` are the innermost calls of the
    thread below the chain, as "file:line in function", innermost first; a launch in C has none.
    """

    actor: int
    launch: int
    since_ns: int
    stack: tuple[str, ...]

    @property
    def where(self) -> str:
        """The innermost call outside of libraries, which is the one that its author knows."""
        own = [c for c in self.stack if not c.startswith(_LIBRARIES) and "site-packages" not in c]
        return (*own, *self.stack, "")[0]


def in_flight(thread: threading.Thread, code: CodeType) -> InFlight | None:
    """Return what a thread runs inside the function with this code; None when it runs nothing.

    The thread goes on meanwhile: the answer is exact for one that is stuck.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    stack: list[str] = []
    while frame is not None and frame.f_code is not code:
        stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    if frame is None:
        return None
    actor, chain, launches, since_ns = _locals(frame, "actor", "chain", "launches", "since")
    if actor is None or actor == NOBODY or chain is None or launches is None:
        return None
    launch = launch_number(chain, max(0, len(chain) - length_hint(launches) - 1))
    return InFlight(actor, launch, since_ns, tuple(stack[:_INNERMOST]))


def _locals(frame: FrameType, *names: str) -> list[Any]:
    values = frame.f_locals
    found = [values.get(name) for name in names]
    if isinstance(values, dict):
        # Before Python 3.13 this is a copy that lives as long as the frame, and so would the arrays
        # of a chain.
        values.clear()
    return found


def launch_number(chain: Chain, item: int) -> int:
    """Return the number in the plan of the launch that runs, or failed, in an item of a chain.

    A loader may join neighbouring launches: what it makes of them says how many they are
    (`num_launches`) and which one runs (`running`). O(items); only failures and stalls ask.
    """
    before = sum([getattr(launch, "num_launches", 1) for launch in chain[:item]])
    return before + (getattr(chain[item], "running", 0) if item < len(chain) else 0)
