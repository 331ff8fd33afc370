"""Fill the caches of torch's compilers with what the rivals of the check will run.

    python benchmarks/gpu/compile_rivals.py

The check runs this beside its proofs, which time nothing: what torch compiles for minutes is there
when its section begins. Each rival has a process of its own, in the group of this one.
"""

from __future__ import annotations

import os
import subprocess
import sys

from gpu.rival import ONLY_COMPILE, end_with_parent
from gpu.sections.rivals import EAGER, FEW_THREADS, SCRIPT, WAVES


def main() -> int:
    end_with_parent()
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), name, variant, ONLY_COMPILE],
            stdin=subprocess.DEVNULL,
            env=os.environ | FEW_THREADS,
        )
        for wave in WAVES
        for name, variant in wave
        if EAGER not in variant
    ]
    return max([process.wait() for process in processes])


if __name__ == "__main__":
    sys.exit(main())
