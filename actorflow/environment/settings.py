"""What the process is told: the environment variables, the logger, the pause of the collector.

`ENVIRONMENT` is the one table of the `ACTORFLOW_*` variables. Whoever starts a run calls
`Settings.from_env(os.environ)` once and passes the frozen value down.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from actorflow.environment.option_values import parse_bytes
from compiler.contract.errors import ActorflowError
from compiler.contract.files import user_path
from compiler.contract.placement import BETWEEN_HOSTS, HOST, Device, MeshLink, distinct_devices

__version__ = "0.2.0"
_PREFIX = "ACTORFLOW_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_EMULATED_GPUS = 8
"""As many as there are in one machine, as a rule."""
MOST_SECONDS = 1e8
"""Of a time that is set: three years, whose count in nanoseconds is below 2**63."""
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_LEVELS = ("debug", "info", "warning", "error")


class SettingsError(ActorflowError):
    """An `ACTORFLOW_*` variable holds a value that means nothing."""


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One environment variable: name, default as a user would write it, meaning."""

    name: str
    default: str
    meaning: str


ENVIRONMENT: tuple[EnvVar, ...] = (
    EnvVar(
        "ACTORFLOW_DEVICE",
        "host",
        "devices of jobs that name none: host, cuda, sim, or several: sim:0,sim:1",
    ),
    EnvVar(
        "ACTORFLOW_DEBUG",
        "",
        "debug= of jobs that have none: nan names the op of the first NaN, inf also of an infinity",
    ),
    EnvVar("ACTORFLOW_DUMP", "", "folder for the graph and the plan after each pass"),
    EnvVar("ACTORFLOW_TRACE", "", "file for the Chrome trace of every firing"),
    EnvVar("ACTORFLOW_VERIFY", "0", "1 verifies the graph after each pass"),
    EnvVar("ACTORFLOW_LOG", "warning", f"lowest level that is logged: {', '.join(_LEVELS)}"),
    EnvVar(
        "ACTORFLOW_TRACEBACK",
        "short",
        "full shows the frames of actorflow's own code in errors, as ACTORFLOW_LOG=debug does",
    ),
    EnvVar("ACTORFLOW_LOG_DIR", "", "folder for what ranks above 0 print: a file for each, whole"),
    EnvVar(
        "ACTORFLOW_CACHE",
        "$XDG_CACHE_HOME/actorflow or ~/.cache/actorflow",
        "folder of plans, compiled kernels and measured rates; off disables it",
    ),
    EnvVar(
        "ACTORFLOW_CACHE_SIZE",
        "1GiB",
        "bytes of plans in the cache; the least recently used, or unused for 90 days, are removed",
    ),
    EnvVar("ACTORFLOW_THREADS", "all cores", "threads that a CPU kernel uses"),
    EnvVar("ACTORFLOW_NATIVE", "1", "0 runs numpy's kernels only, without a C compiler"),
    EnvVar(
        "ACTORFLOW_STALL_SECONDS",
        "60",
        "seconds without a firing after which a run reports a stall; 0 never",
    ),
    EnvVar(
        "ACTORFLOW_RANK_SECONDS",
        "600",
        "seconds that ranks wait for a rank that is missing or stopped; 0 for no limit",
    ),
    EnvVar(
        "ACTORFLOW_HOST_INDEX",
        "what the scheduler says",
        "number of this host, from 0, for 'actorflow launch --hosts'",
    ),
    EnvVar("ACTORFLOW_KEY_FILE", "", "file with the secret of 'actorflow launch --hosts'"),
    EnvVar(
        "ACTORFLOW_LINK",
        "measured at the start on several hosts, else 1.25:30",
        "link of each host to the others, GB/s each way and us a message, that layouts are chosen"
        " by; the same on all hosts",
    ),
    EnvVar("ACTORFLOW_SIM_SEED", "0", "seed of the delays of simulated devices"),
    EnvVar(
        "ACTORFLOW_GPU", "the one present", "GPU that jobs on cuda are planned for, such as h200"
    ),
    EnvVar(
        "ACTORFLOW_CUDA",
        "",
        "emulated runs plans for cuda on the host, slowly, as 8 GPUs; emulated:2 as 2 GPUs",
    ),
    EnvVar(
        "ACTORFLOW_CUDNN", "where it is installed", "1 plans cuDNN's kernels for cuda, 0 does not"
    ),
    EnvVar(
        "ACTORFLOW_SYNC", "0", "1 waits on cuda after each launch, so that an error names its op"
    ),
)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


STARTED_IN = _working_folder()
"""Where the process was when actorflow was imported: a script may go elsewhere later."""

REPLAY = "ACTORFLOW_REPLAY"

TOLD_TO_SCRIPTS = ("ACTORFLOW_COMMAND", "ACTORFLOW_EPOCH", "ACTORFLOW_LAUNCH", REPLAY)
"""What the launcher, and `actorflow replay`, tell a script; not for users to set."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; the fields follow `ENVIRONMENT`.

    `log_level` is a name that `logging` knows ("WARNING"). `cache` is None if the plan cache is
    off, `threads` is None for all cores, `stall_seconds` is 0 for never, `rank_seconds` is 0 for
    ever, `host_index` is None for what a scheduler says, `link` is that of a host to the others,
    `gpu` is empty for the one that is here,
    `launch` names the launch that this is a rank of, `epoch` its start,
    `emulated_gpus` is 0 where the host acts none, `cudnn` is None for where it is installed.
    `warnings` are texts for the user: unknown names, and a cache that has no place.
    """

    devices: tuple[Device, ...] = (HOST,)
    gpu: str = ""
    emulated_gpus: int = 0
    cudnn: bool | None = None
    sync: bool = False
    debug: str = ""
    dump: Path | None = None
    trace: Path | None = None
    verify: bool = False
    log_level: str = "WARNING"
    shows_all_frames: bool = False
    log_dir: Path | None = None
    cache: Path | None = None
    cache_bytes: int = 1 << 30
    threads: int | None = None
    native: bool = True
    stall_seconds: float = 60.0
    rank_seconds: float = 600.0
    host_index: int | None = None
    key_file: Path | None = None
    link: MeshLink = BETWEEN_HOSTS
    sim_seed: int = 0
    epoch: int = 1
    launch: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read every variable once. An empty value is as good as none.

        An unknown name is a warning and no error: it may belong to another version that shares the
        shell.

        Raises:
            SettingsError: a value means nothing; names the variable, the value and what is
            possible.
        """
        warnings = [_unknown_text(name) for name in unknown_names(environ)]
        cache = _cache(environ)
        if cache is None and not environ.get("ACTORFLOW_CACHE"):
            warnings.append(
                "the plan cache is off: neither HOME nor XDG_CACHE_HOME is set;"
                " set ACTORFLOW_CACHE to a folder"
            )
        return cls(
            devices=devices_named(environ.get("ACTORFLOW_DEVICE", ""), "ACTORFLOW_DEVICE"),
            gpu=environ.get("ACTORFLOW_GPU", "").strip(),
            emulated_gpus=_emulated(environ, "ACTORFLOW_CUDA"),
            cudnn=_flag_or_auto(environ, "ACTORFLOW_CUDNN"),
            sync=_flag(environ, "ACTORFLOW_SYNC"),
            debug=_debug(environ, "ACTORFLOW_DEBUG"),
            dump=_path(environ, "ACTORFLOW_DUMP"),
            trace=_path(environ, "ACTORFLOW_TRACE"),
            verify=_flag(environ, "ACTORFLOW_VERIFY"),
            log_level=_level(environ, "ACTORFLOW_LOG"),
            shows_all_frames=_is_full(environ, "ACTORFLOW_TRACEBACK"),
            log_dir=_path(environ, "ACTORFLOW_LOG_DIR"),
            cache=cache,
            cache_bytes=_bytes(environ, "ACTORFLOW_CACHE_SIZE", "1GiB"),
            threads=_threads(environ, "ACTORFLOW_THREADS"),
            native=_flag(environ, "ACTORFLOW_NATIVE", default=True),
            stall_seconds=_seconds(
                environ, "ACTORFLOW_STALL_SECONDS", "60", "0 turns the watchdog off"
            ),
            rank_seconds=_seconds(
                environ, "ACTORFLOW_RANK_SECONDS", "600", "0 lets ranks wait without limit"
            ),
            host_index=_index(environ, "ACTORFLOW_HOST_INDEX"),
            key_file=_path(environ, "ACTORFLOW_KEY_FILE"),
            link=_link(environ, "ACTORFLOW_LINK"),
            sim_seed=_seed(environ, "ACTORFLOW_SIM_SEED"),
            epoch=_index(environ, "ACTORFLOW_EPOCH") or 1,
            launch=environ.get("ACTORFLOW_LAUNCH", ""),
            warnings=tuple(warnings),
        )


def unknown_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the `ACTORFLOW_*` names of `environ` that mean nothing, sorted."""
    names = {variable.name for variable in ENVIRONMENT} | {*TOLD_TO_SCRIPTS}
    return tuple(sorted(name for name in environ if name.startswith(_PREFIX) and name not in names))


def environment_table() -> str:
    """Return `ENVIRONMENT` as a Markdown table, for docs/command_line.md."""
    rows = [
        f"| `{v.name}` | {f'`{v.default}`' if v.default else 'unset'} | {v.meaning} |"
        for v in ENVIRONMENT
    ]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def _unknown_text(name: str) -> str:
    settings = [variable.name.removeprefix(_PREFIX) for variable in ENVIRONMENT]
    # Without the prefix, which alone would make any two names look alike.
    nearest = _nearest(name.removeprefix(_PREFIX), settings)
    names = ", ".join(variable.name for variable in ENVIRONMENT)
    mend = f"did you mean {_PREFIX}{nearest[0]}?" if nearest else f"known are {names}"
    return f"{name} is set, and no such setting exists; {mend}"


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name, "")
    return _expanded(value, environ) if value else None


def _expanded(value: str, environ: Mapping[str, str]) -> Path:
    """Replace a leading ~/ by HOME of the mapping, not of the process."""
    home = environ.get("HOME", "")
    # `expanduser` would read the process's HOME, and `environ` may be another mapping.
    if home and (value == "~" or value.startswith("~/")):
        return Path(home) / value[2:]
    return Path(user_path(value))


def _cache(environ: Mapping[str, str]) -> Path | None:
    value = environ.get("ACTORFLOW_CACHE", "")
    if value.lower() == "off":
        return None
    if value:
        return _expanded(value, environ)
    base = environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG specification: a relative path is to be ignored
        return Path(base) / "actorflow"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "actorflow" if home else None


def _bytes(environ: Mapping[str, str], name: str, default: str) -> int:
    try:
        return parse_bytes(environ.get(name, "").strip() or default)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def _flag(environ: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    value = environ.get(name, "").lower()
    if not value:
        return default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingsError(f"{name}: expected 1 or 0 (or true, false), came {environ[name]!r}")


def _flag_or_auto(environ: Mapping[str, str], name: str) -> bool | None:
    value = environ.get(name, "").strip().lower()
    return None if value in ("", "auto") else _flag(environ, name)


def _nearest(word: str, known: Iterable[str]) -> list[str]:
    import difflib  # only for what was mistyped

    return difflib.get_close_matches(word, list(known), n=1)


def devices_named(text: str, said: str) -> tuple[Device, ...]:
    """Return the devices of a list with commas, the host for an empty one.

    `said` is the variable, or the option, that `text` was given by. Raises SettingsError.
    """
    names = (text.strip() or "host").split(",")
    try:
        return distinct_devices([name.strip() for name in names])
    except ValueError as error:
        raise SettingsError(f"{said}: {error}") from None


def _debug(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip().lower()
    if value not in ("", "nan", "inf"):
        raise SettingsError(
            f"{name}: expected 'nan' or 'inf', or nothing to look for neither, came"
            f" {environ[name]!r}"
        )
    return value


def _emulated(environ: Mapping[str, str], name: str) -> int:
    word, colon, count = environ.get(name, "").strip().lower().partition(":")
    if not word and not colon:
        return 0
    if word == "emulated" and not colon:
        return _EMULATED_GPUS
    if word == "emulated" and count.isascii() and count.isdigit() and int(count) > 0:
        return int(count)
    raise SettingsError(
        f"{name}: expected 'emulated', 'emulated:2' for as many GPUs, or nothing for those that are"
        f" here, came {environ[name]!r}"
    )


def _level(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "") or "warning"
    if value.lower() in _LEVELS:
        return value.upper()
    nearest = _nearest(value.lower(), _LEVELS)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise SettingsError(f"{name}: expected one of {', '.join(_LEVELS)}, came {value!r}{hint}")


def _is_full(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower() or "short"
    if value in ("short", "full"):
        return value == "full"
    raise SettingsError(
        f"{name}: expected 'short' or 'full', came {environ[name]!r}; unset it for 'short'"
    )


def _threads(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "").strip()
    if not value:
        return None
    if value.isascii() and value.isdigit() and int(value) > 0:
        return int(value)
    raise SettingsError(
        f"{name}: expected a number of threads from 1 up, came {environ[name]!r};"
        " unset it to use all cores"
    )


def _index(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdigit()):
        raise SettingsError(f"{name}: expected a number from 0 up, came {environ[name]!r}")
    return int(value)


def _seed(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "").strip() or "0"
    if value.isascii() and value.isdigit():
        return int(value)
    raise SettingsError(f"{name}: expected an integer from 0 up, came {environ[name]!r}")


def _link(environ: Mapping[str, str], name: str) -> MeshLink:
    value = environ.get(name, "").strip()
    if not value:
        return BETWEEN_HOSTS
    rate, _, latency = value.partition(":")
    # `float` alone would take "inf", "1_0" and digits of other scripts.
    if all([_NUMBER.fullmatch(number) for number in (rate, latency)]):
        link = MeshLink(float(rate), float(latency) * 1e3)
        if link.is_possible:
            return link
    raise SettingsError(
        f"{name}: expected GB/s above 0 and us from 0 up, as 12.5:5, came {environ[name]!r}; unset"
        " it for 1.25:30, a link of 10 Gbit/s"
    )


def _seconds(environ: Mapping[str, str], name: str, default: str, zero: str) -> float:
    value = environ.get(name, "").strip() or default
    is_number = value.isascii() and value.replace(".", "", 1).isdigit()
    if is_number and float(value) <= MOST_SECONDS:
        return float(value)
    raise SettingsError(
        f"{name}: expected a number of seconds from 0 to {MOST_SECONDS:,.0f}, came"
        f" {environ[name]!r}; {zero}"
    )


class _Unfailing(logging.Logger):
    """A logger whose handlers, which are others', may fail; that never ends a run."""

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        try:
            super().callHandlers(record)
        except Exception:
            with suppress(Exception):  # stderr may be what failed
                logging.Handler().handleError(record)


logger = logging.getLogger("actorflow")
"""Warnings reach stderr even where a program never set up logging; that is logging's own rule."""

# The program may have asked for this logger before us, or have a class of its own for loggers.
logger.__class__ = type("UnfailingLogger", (_Unfailing, type(logger)), {})


_SHOWN = 10


def is_worth_a_line(count: int) -> bool:
    """Whether the count-th of equal events is told: the first ones, then every tenfold number."""
    return count <= _SHOWN or math.log10(count).is_integer()


def once(tell: Callable[[str], object]) -> Callable[[str], None]:
    """Return a function that tells the first text it is given, and no other."""
    texts: list[str] = []

    def tell_once(text: str) -> None:
        if not texts:
            texts.append(text)
            tell(text)

    return tell_once


def configure(level: str) -> None:
    """Set the least level that is logged; below warnings make sure that there is a handler."""
    logger.setLevel(level)
    if logger.level < logging.WARNING and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("actorflow: %(message)s"))
        logger.addHandler(handler)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector of this process; it is left as it was found.

    A compilation makes some hundred small objects per node and no garbage in circles. The
    collector looks at all that lives again and again: a fifth of the time at 10,000 nodes, a third
    at 100,000.

    Also a decorator, but not where the user's own function runs: it adds a frame to the stack.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
