"""Store what torch computes for all files of cases and of curves, or for those named.

    python tests/oracle/store.py [NAME ...]

See `make oracle-store`.
"""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOUND_IN = [str(HERE.parent / "shared"), str(HERE.parents[1] / "examples")]


def main(names):
    import curves
    import oracle
    import torch

    for file in sorted(HERE.rglob("test_*.py")):
        name = file.stem.removeprefix("test_")
        if names and name not in names:
            continue
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "CURVES"):
            own = module.CURVES
            curves.store(name, own, torch)
        else:
            own = module.CASES
            oracle.store(name, own, torch)
        print(f"{len(own):4} of {file.name}", file=sys.stderr)


if __name__ == "__main__":
    sys.path[:0] = FOUND_IN
    main(sys.argv[1:])
