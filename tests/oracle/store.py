"""Store what torch computes for every file of cases; see `make oracle`."""

import importlib.util
import sys
from pathlib import Path

import oracle
import torch

HERE = Path(__file__).resolve().parent

for file in sorted(HERE.glob("test_*.py")):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    oracle.store(file.stem.removeprefix("test_"), module.CASES, torch)
    print(f"{len(module.CASES):4} cases of {file.name}", file=sys.stderr)
