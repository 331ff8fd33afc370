"""What runs in the process of one section.

    python benchmarks/gpu/child.py NAME FILE --shared DIR [--seconds S] [--emulated]

What it finds is in FILE after every finding, so that one that is killed has told what it knew.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import time
import traceback
from pathlib import Path

from gpu.section import SECTIONS, Findings, Place, Skipped, find_section


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    findings = Findings(options.file)
    ends = time.monotonic() + options.seconds
    place = Place(options.name, options.shared, options.emulated, ends)
    try:
        module = find_section(options.name, SECTIONS).module
        importlib.import_module(f"gpu.sections.{module}").run(findings, place)
    except Skipped as why:
        findings.skipped = str(why)
    except BaseException:
        traceback.print_exc()
        return 1
    findings.write()
    return 0


if __name__ == "__main__":
    # Whatever has threads or a dead context left is not wound up.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
