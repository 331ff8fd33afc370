"""Which engines are compared, in which environment each is at its best, and the process of one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from actorflow.cli.launched import die_with
from compiler.contract.errors import ActorflowError

ROOT = Path(__file__).resolve().parents[2]


class EngineError(ActorflowError):
    """An engine is not there, or failed; names the engine and says why."""


class LossMismatch(EngineError):
    """Two engines do not compute the same."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its script, the folder of its environment, and the settings to be tried.

    `folder` is empty for the Python that runs this. `variants` are tried one by one, and the
    fastest is measured; `row_variants` are pairs (row, variant) that only one row has beside them.
    `cache_variables` name folders that it keeps compiled programs in. Rows in other than its
    `precisions` pass it by, and those that train where it `only_infers`. `device` is what it
    computes on: "host", or "cuda".
    """

    name: str
    script: str
    folder: str
    variants: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    cache_variables: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("fp32", "bf16")
    row_variants: tuple[tuple[str, str], ...] = ()
    device: str = "host"
    only_infers: bool = False

    def takes(self, precision: str, is_training: bool) -> bool:
        """Return whether a row of a precision is compared with this engine."""
        return precision in self.precisions and not (is_training and self.only_infers)

    def variants_of(self, row: str) -> tuple[str, ...]:
        """Return the settings to be tried for a row."""
        return (*self.variants, *[variant for name, variant in self.row_variants if name == row])


_MALLOC = (
    # Large blocks stay with the process instead of being mapped and zeroed in every step.
    ("MALLOC_MMAP_THRESHOLD_", "4294967296"),
    ("MALLOC_TRIM_THRESHOLD_", "68719476736"),
    ("MALLOC_TOP_PAD_", "268435456"),
)

OURS = Engine("actorflow", "actorflow_engine.py", "", ("",), (), ("ACTORFLOW_CACHE",))

_COMPILED = ("default", "max-autotune-no-cudagraphs")
_CHUNKED = (("gpt-vocab", "chunked"),)
_PICTURES = ("lenet", "resnet-18", "resnet-50", "unet", "vit-s", "resnet-50-inference")
_CHANNELS_LAST = tuple([(row, "channels_last") for row in _PICTURES])
_COMPILED_LAST = tuple([(row, "default channels_last") for row in _PICTURES])
_JAX = (
    ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"),
    ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1"),
)
_TENSORFLOW = (("TF_CPP_MIN_LOG_LEVEL", "3"), ("CUDA_VISIBLE_DEVICES", "-1"))

RIVALS: tuple[Engine, ...] = (
    Engine(
        "torch", "torch_engine.py", "torch", ("eager",), _MALLOC,
        row_variants=(*_CHUNKED, *_CHANNELS_LAST),
    ),
    Engine(
        "torch.compile", "torch_engine.py", "torch", _COMPILED, _MALLOC,
        ("TORCHINDUCTOR_CACHE_DIR",), row_variants=_COMPILED_LAST,
    ),
    Engine(
        "jax", "jax_engine.py", "jax", ("jit",), (*_MALLOC, *_JAX), ("JAX_COMPILATION_CACHE_DIR",),
        ("fp32",), _CHUNKED,
    ),
    Engine(
        "tensorflow", "tensorflow_engine.py", "tensorflow", ("graph", "xla"),
        (*_MALLOC, *_TENSORFLOW), precisions=("fp32",),
    ),
    *[
        Engine(
            name, "onnx_engine.py", name, (variant,), _MALLOC, ("BENCH_ONNX",), ("fp32",),
            only_infers=True,
        )
        for name, variant in (("onnxruntime", "session"), ("openvino", "latency"))
    ],
)  # fmt: skip

_TORCH, _TORCH_COMPILE, _JAX_JIT, *_ = RIVALS
RIVALS_ON_GPU: tuple[Engine, ...] = tuple(
    [
        replace(engine, device="cuda", environment=_JAX, row_variants=())
        for engine in (
            _TORCH,
            replace(_TORCH_COMPILE, variants=("default",)),
            replace(_TORCH_COMPILE, name="torch.reduce-overhead", variants=("reduce-overhead",)),
            _JAX_JIT,
        )
    ]
)
"""TensorFlow and what reads ONNX are left out, and so is what only helps on a host."""


def engines_on(device: str) -> tuple[Engine, tuple[Engine, ...]]:
    """Return our engine on a device, "host" or "cuda", and the rivals that there are for it."""
    return replace(OURS, device=device), RIVALS if device == "host" else RIVALS_ON_GPU


def chosen_rivals(text: str | None, rivals: tuple[Engine, ...]) -> tuple[Engine, ...]:
    """Return the engines of a comma-separated list, all for None. Raises EngineError."""
    if text is None:
        return rivals
    named = {engine.name: engine for engine in rivals}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in named:
            raise EngineError(
                f"--against: expected some of {','.join(named)}, separated by commas, got {name!r}"
            )
    return tuple([named[name] for name in dict.fromkeys(names)])


def command_of(engine: Engine, scripts: Path, environments: Path) -> tuple[str, ...]:
    """Return what starts an engine. Raises EngineError where its environment is not there.

    On a GPU it is taken from the Python that runs this where it has no environment of its own: who
    has a GPU has torch for it, and no place for another.
    """
    script = scripts / engine.script
    if not script.is_file():
        raise EngineError(
            f"{script} is not there: the comparison runs in a clone of the repository, whose"
            " benchmarks/ is not part of an installed package"
        )
    if not engine.folder:
        return sys.executable, str(script)
    python = environments / engine.folder / "bin" / "python"
    if not python.exists():
        if engine.device != "host":
            return sys.executable, str(script)
        raise EngineError(
            f"{engine.name} has no environment: expected {python}; `make bench-env` makes it"
        )
    return str(python), str(script)


def environment_of(
    engine: Engine, environ: Mapping[str, str], cache: Path, num_threads: int
) -> dict[str, str]:
    """Return the environment variables of an engine's process.

    What the caller's shell says of threads and of BLAS kernels would change the result, so that it
    is taken out; `cache` is the folder of compiled programs.
    """
    dropped = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")
    base = {name: value for name, value in environ.items() if name not in dropped}
    base |= {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    return base | dict(engine.environment) | {name: str(cache) for name in engine.cache_variables}


# A process of an engine has one row. It says nothing unless it is asked, and answers every line
# with one line, see benchmarks/engines/serve.py.

_LAST_LINES = 3
_WAIT_S = 10.0
_USER, _SYSTEM = 11, 12
"""Ticks in user and kernel mode, counted after the name of the process: proc(5)."""


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a group of its own, so that ^C is for us alone; it dies with us."""
    dies = partial(die_with, os.getpid()) if sys.platform == "linux" else None
    return subprocess.Popen(
        list(command),
        start_new_session=True,
        preexec_fn=dies,  # noqa: PLW1509  # there is one thread, whose end is ours
        **options,
    )


def end_process(process: subprocess.Popen[Any]) -> None:
    """Kill a started process with its group, which holds what it has started itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Child:
    """A started engine. Leaving it as a context ends the process, whatever it is doing."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._began = time.perf_counter()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        try:
            self._process = start_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"{name} does not start: {error}") from error
        self._input = cast("IO[str]", self._process.stdin)
        self._output = cast("IO[str]", self._process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the process and all that it started; a second call does nothing."""
        end_process(self._process)
        for pipe in (self._input, self._output, self._log):
            with contextlib.suppress(BrokenPipeError):  # a line that was never read
                pipe.close()

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._began

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Send one line and return the answer. Raises EngineError with the engine's own message."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last line is to be read
            self._input.write(json.dumps({"do": verb} | arguments) + "\n")
            self._input.flush()
        line = self._output.readline()
        if not line:
            raise EngineError(f"{self.name} ended without an answer to {verb!r}: {self._ending()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise EngineError(
                f"{self.name} answered {verb!r} with no JSON: {line.strip()[:200]!r}"
            ) from None
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return dict(answer)

    def cpu_s(self) -> float:
        """Return the processor time used so far; 0 where the system does not tell."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")

    def _ending(self) -> str:
        try:
            code: int | None = self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            code = None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        tail = " / ".join(lines[-_LAST_LINES:]) or "it said nothing"
        return f"exit code {code}; {tail}"
