"""Which launch of the plan a chain is at, when some of its items are several launches in one call.

A loader may join neighbouring launches. What it makes of them says how many they are
(`num_launches`) and which one runs, or failed (`running`); any other item is one launch.
"""

from __future__ import annotations

from actors.protocol import Chain


def launch_number(chain: Chain, item: int) -> int:
    """Return the number in the plan of the launch that runs, or failed, in an item of a chain.

    O(items); only failures and stalls ask.
    """
    before = sum([getattr(launch, "num_launches", 1) for launch in chain[:item]])
    return before + (getattr(chain[item], "running", 0) if item < len(chain) else 0)
