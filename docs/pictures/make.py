"""Make the pictures of the README: `python docs/pictures/make.py`, which takes some minutes.

Needs chromium, and Pillow to keep the files small. Trains the demo twice for the report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEMO = str(ROOT / "examples" / "char_gpt.py")
COLOURS = 128


def called(*words: str, folder: Path) -> None:
    """Run a command of actorflow or Python in a folder, with messages as in any language."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORFLOW_LOG": "error"}
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True)


def photographed(page: Path, picture: Path, width: int, height: int) -> None:
    """Write what a browser shows of a page, in few colours."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("there is no chromium to look at pages with")
    raw = page.with_suffix(".png")
    size = [f"--window-size={width},{height}", "--hide-scrollbars", "--virtual-time-budget=5000"]
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *size]
    subprocess.run(
        [*command, f"--screenshot={raw}", page.as_uri()], check=True, capture_output=True
    )
    image = Image.open(raw).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(picture, optimize=True)


def main() -> None:
    """Make all pictures."""
    actorflow = ("-m", "actorflow")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(DEMO, folder / "char_gpt.py")  # its lines are named by a short path
        shutil.copy(ROOT / "examples" / "texts.py", folder)
        memory = str(HERE / "memory_map.png")
        called(*actorflow, "plan", "char_gpt.py", "--memory", memory, folder=folder)
        plan = folder / "plan.html"
        called(*actorflow, "plan", "char_gpt.py", "--html", str(plan), folder=folder)
        photographed(plan, HERE / "plan.png", 1200, 700)
        script = (folder / "char_gpt.py").read_text(encoding="utf-8")
        runs = ["rate 0.001", "rate 0.003", "rate 0.01"]
        for run in runs:
            changed = script.replace("AdamW(1e-3)", f"AdamW({run.split()[1]})")
            (folder / "char_gpt.py").write_text(changed, encoding="utf-8")
            called("char_gpt.py", "--steps", "400", "--checkpoint", run, folder=folder)
        report = folder / "report.html"
        called(*actorflow, "report", *runs, "--out", str(report), folder=folder)
        photographed(report, HERE / "report.png", 1200, 700)


if __name__ == "__main__":
    main()
