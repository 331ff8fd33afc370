"""Try the files of a release as a user gets them: `python tests/release.py dist`.

Each file is installed into an environment of its own. There, outside of the clone, every file of
the four packages has to be, and a job has to train with the same loss as here, by numpy's kernels
and natively. Nothing is uploaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("actorflow", "actors", "compiler", "memory")

PROGRAM = """
import sys
import numpy as np
import actorflow as af
from actorflow import nn

assert "site-packages" in af.__file__, af.__file__

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return ((model(batch.x) - batch.y) ** 2).mean()

if __name__ == "__main__":
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    data = af.data.ArraySource({"x": x, "y": np.sin(9 * x[:, :1])}, batch=8)
    result = train.fit(nn.Linear(4, 1), data, steps=5, progress=False)
    print(f"{result.metrics['loss']:.6f}")
"""


def main() -> None:
    files = sorted(Path(sys.argv[1]).glob("actorflow-*"))
    suffixes = [file.name.rpartition(".")[2] for file in files]
    if suffixes != ["whl", "gz"] and suffixes != ["gz", "whl"]:
        sys.exit(f"expected a wheel and an sdist in {sys.argv[1]}, came {[f.name for f in files]}")
    losses = {loss for file in files for loss in tried(file.resolve())}
    if len(losses) != 1:
        sys.exit(f"the releases train differently: {sorted(losses)}")
    print(f"wheel and sdist train: loss {losses.pop()}")


def tried(file: Path) -> list[str]:
    """Return the losses of a release, with each kind of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "env", with_pip=True)
        python = str(home / "env" / "bin" / "python")
        run(
            home,
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            str(file),
        )
        where = run(home, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        missing = sorted(set(product_files()) - set(files_in(Path(where))))
        if missing:
            sys.exit(f"{file.name} lacks {', '.join(missing)}")
        (home / "train.py").write_text(PROGRAM)
        run(home, str(home / "env" / "bin" / "actorflow"), "plan", "train.py", "--full")
        return [run(home, python, "train.py", ACTORFLOW_NATIVE=native) for native in "01"]


def run(home: Path, *command: str, **environment: str) -> str:
    """Return what a program prints, in a folder with a cache of its own; its failure ends us."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("ACTORFLOW", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=home,
        env={**inherited, "ACTORFLOW_CACHE": str(home / "cache"), **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def product_files() -> list[str]:
    """Return the files of the packages that are under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if name]


def files_in(folder: Path) -> list[str]:
    return [
        str(path.relative_to(folder))
        for package in PACKAGES
        for path in (folder / package).rglob("*")
        if path.is_file()
    ]


if __name__ == "__main__":
    main()
