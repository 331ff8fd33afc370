"""A headless browser to look at pages with: what they are once their scripts have run."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium to look at pages with"
)
SCREEN = (1400, 1000)

_FRAME = """<!doctype html><body style="margin: 0"><script>
addEventListener("message", event => Object.assign(document.body.dataset, event.data));
</script><iframe src="page.html" style="border: 0; width: {width}px; height: 3000px"></iframe>"""


@dataclass(frozen=True)
class Seen:
    """A page that was looked at: its elements as text, and what its console shows."""

    dom: str
    console: tuple[str, ...]

    @property
    def state(self):
        """What the page says of itself, in data attributes of its body."""
        return dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", self.dom)[0]))


def probed(page, script):
    """Return a page with one more script at its end, which its policy lets run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    return page.replace("</body>", f"<script>{script}</script></body>")


def look(page, folder, *options, width=None):
    """Open a page in the browser; in a frame of a width, for less than a window has.

    A page in a frame tells its state by a message to its parent.
    """
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    if width is not None:
        path = folder / "frame.html"
        path.write_text(_FRAME.format(width=width))
    return look_at(f"file://{path}", folder, *options)


def look_at(address, folder, *options):
    """Open an address in a browser whose profile is in a folder."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr", f"--window-size={SCREEN[0]},{SCREEN[1]}",
            *(options or ["--dump-dom"]), address,
        ],
        env={**os.environ, "HOME": str(folder)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Seen(
        done.stdout, tuple([line for line in done.stderr.splitlines() if "CONSOLE" in line])
    )
