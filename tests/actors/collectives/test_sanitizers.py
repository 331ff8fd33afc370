"""The C of meetings under the sanitizers of the compiler: races, bytes out of bounds, overflows."""

import shutil
import subprocess
from pathlib import Path

import pytest
import rank_threads

from actors.collectives import segments
from actors.kernels.library.runtime import text_of

HARNESS = Path(rank_threads.__file__).with_name("meet_threads.c")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_meetings_are_sound(native_toolchain, tmp_path, sanitizer):
    source, program = tmp_path / "meet.c", tmp_path / "meet"
    source.write_text(text_of(segments.SOURCE) + HARNESS.read_text())
    flags = ["-O1", "-g", f"-fsanitize={sanitizer}", "-std=gnu11", "-fopenmp-simd"]
    command = [*native_toolchain.command, *flags, str(source), "-o", str(program), "-lm"]
    built = subprocess.run([*command, "-lpthread"], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"the compiler has no sanitizer {sanitizer}: {built.stderr[:200]}")
    # Addresses that the system draws may be where the sanitizer of threads keeps its notes.
    fixed = [shutil.which("setarch"), "-R"] if shutil.which("setarch") else []
    ended = subprocess.run(
        [*fixed, str(program)], capture_output=True, text=True, check=False, timeout=100
    )
    if "unexpected memory mapping" in ended.stderr or "setarch" in ended.stderr:
        pytest.skip(f"the sanitizer does not run here: {ended.stderr[:200]}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "met\n", "")
