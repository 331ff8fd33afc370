"""What the kernels of GPT-2 use of a multiprocessor, and the file that keeps it.

    python benchmarks/gpu/usage_gpt2.py [--nvrtc FOLDER ...]      # make golden

Compiles every kernel text that training GPT-2 of 124 M runs, for three architectures, by the NVRTC
that is installed and by that of each folder (of `pip install --target FOLDER`). Registers and bytes
as the assembler says them go into tests/data/gpt2_kernels.json; no GPU is needed. What other
versions said stays there while it is of the same texts, and else leaves it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from actors.kernels.cuda import nvrtc  # noqa: E402
from actors.kernels.cuda.calls import KernelText  # noqa: E402
from gpu.plan_gpt2 import planned  # noqa: E402
from gpu.sections.texts import texts_of  # noqa: E402

KEPT = ROOT / "tests" / "data" / "gpt2_kernels.json"
ARCHES = ("sm_80", "sm_90a", "sm_100")
COLUMNS = "registers, spilled bytes, stack bytes, shared bytes"

Used = Mapping[str, Mapping[str, str]]
"""By architecture and kernel the numbers of COLUMNS."""


def gpt2_texts() -> list[KernelText]:
    """Return the kernel texts of GPT-2's training step and snapshot, attention composed."""
    os.environ["ACTORFLOW_CUDNN"] = "0"  # cuDNN's attention has no text, and needs its packages
    return sorted(texts_of([planned(64).plan]), key=lambda text: (text.about, text.kernels))


def used_on(arch: str, texts: Sequence[KernelText]) -> dict[str, str]:
    """Return what each kernel uses, by its name. Raises CompileError, and DeviceError."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        usages = [*pool.map(functools.partial(nvrtc.usage, arch=arch), texts)]
    return {
        name: " ".join(map(str, astuple(used)))
        for kernels in usages
        for name, used in kernels.items()
    }


def version_name() -> str:
    """Return the version of the NVRTC that is installed: "13.5"."""
    return ".".join(map(str, nvrtc.version()))


def digest_of(texts: Sequence[KernelText]) -> str:
    """Return what changes with any text, or with the header of all of them."""
    header = ROOT / "actors" / "kernels" / "cuda" / "device.cuh"
    whole = "\n".join([header.read_text(encoding="utf-8"), *[text.text for text in texts]])
    return hashlib.blake2b(whole.encode(), digest_size=10).hexdigest()


def kept_for(version: str) -> Used | None:
    """Return what the file keeps for a version of NVRTC; None where it was not asked."""
    used: dict[str, Used] = json.loads(KEPT.read_text(encoding="utf-8"))["used"]
    return used.get(version)


def keep(version: str, texts: Sequence[KernelText], used: Used) -> None:
    """Put what a version says into the file, and take out what is not of these kernels."""
    about = {name: text.about for text in texts for name in text.kernels}
    before = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"used": {}}
    others = {v: rows for v, rows in before["used"].items() if v != version}
    digest = digest_of(texts)
    if others and before["texts"] != digest:
        print(f"NVRTC {', '.join(others)} is taken out: it was asked for other texts")
        others = {}
    table = {
        "columns": COLUMNS,
        "texts": digest,
        "about": about,
        "used": {**others, version: used},
    }
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    most = max([int(row.split()[0]) for rows in used.values() for row in rows.values()])
    print(f"NVRTC {version}: {len(about)} kernels, {most} registers at most")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvrtc", nargs="*", default=[], metavar="FOLDER")
    folders = parser.parse_args().nvrtc
    texts = gpt2_texts()
    keep(version_name(), texts, {arch: used_on(arch, texts) for arch in ARCHES})
    for folder in folders:  # a process loads one version
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run([sys.executable, __file__], env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
