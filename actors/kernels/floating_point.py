"""What a thread sets once before it runs launches."""

from __future__ import annotations

import numpy as np

BUFFER_ELEMENTS = 1024


def quiet_floating_point() -> None:
    """Make this thread's numpy calls silent on overflow and the like, with small buffers.

    To be called by every thread that runs launches, once, before the first. Overflow to infinity
    and NaN are ordinary values inside a kernel (an exponential is tried before its maximum is
    known), so a warning would be noise, and under `-W error` an exception in the middle of a
    step. numpy keeps this state per thread and context; an `errstate` block per launch would cost
    about a microsecond.

    numpy copies broadcast and strided operands through transient buffers of its own. With 8,192
    elements (its default) they reach 100 KiB per call; with 1,024 they stay in the first-level
    cache and measured equally fast or faster. Elementwise results do not depend on it.
    """
    np.seterr(all="ignore")
    np.setbufsize(BUFFER_ELEMENTS)
