import logging
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from error_texts import raises

from actorflow.environment.settings import ENVIRONMENT, Settings, SettingsError, environment_table
from compiler.contract.placement import Device, DeviceKind, MeshLink

HOME = {"HOME": "/home/ann"}


def test_an_empty_environment_gives_the_defaults():
    assert Settings.from_env(HOME) == Settings(cache=Path("/home/ann/.cache/actorflow"))
    assert Settings().log_level == "WARNING"


def test_every_variable_is_read():
    settings = Settings.from_env(
        {
            "ACTORFLOW_DEVICE": "sim:1",
            "ACTORFLOW_GPU": " h200 ",
            "ACTORFLOW_CUDA": "Emulated",
            "ACTORFLOW_CUDNN": "Off",
            "ACTORFLOW_SYNC": "yes",
            "ACTORFLOW_DEBUG": "nan",
            "ACTORFLOW_DUMP": "out/dump",
            "ACTORFLOW_TRACE": "~/trace.json",
            "ACTORFLOW_VERIFY": "1",
            "ACTORFLOW_LOG": "Debug",
            "ACTORFLOW_CACHE": "/big/cache",
            "ACTORFLOW_THREADS": "3",
            "ACTORFLOW_STALL_SECONDS": "2.5",
            "ACTORFLOW_RANK_SECONDS": "30",
            "ACTORFLOW_HOST_INDEX": " 2 ",
            "ACTORFLOW_KEY_FILE": "~/key",
            "ACTORFLOW_LINK": "12.5:5",
            "ACTORFLOW_SIM_SEED": "7",
            **HOME,
        }
    )
    assert settings == Settings(
        devices=(Device(DeviceKind.SIM, 1),),
        gpu="h200",
        emulated_gpus=8,
        cudnn=False,
        sync=True,
        debug="nan",
        dump=Path("out/dump"),
        trace=Path("/home/ann/trace.json"),
        verify=True,
        log_level="DEBUG",
        cache=Path("/big/cache"),
        threads=3,
        stall_seconds=2.5,
        rank_seconds=30.0,
        host_index=2,
        key_file=Path("/home/ann/key"),
        link=MeshLink(12.5, 5_000.0),
        sim_seed=7,
    )


def test_each_variable_of_the_table_is_known_and_changes_something():
    values = {
        "ACTORFLOW_DEVICE": "sim",
        "ACTORFLOW_CUDA": "emulated",
        "ACTORFLOW_DEBUG": "inf",
        "ACTORFLOW_LOG": "error",
        "ACTORFLOW_NATIVE": "0",
        "ACTORFLOW_TRACEBACK": "full",
        "ACTORFLOW_LINK": "10:0",
    }
    for variable in ENVIRONMENT:
        changed = Settings.from_env({**HOME, variable.name: values.get(variable.name, "1")})
        assert changed != Settings.from_env(HOME)
        assert changed.warnings == ()


@pytest.mark.parametrize(("value", "cudnn"), [("auto", None), ("1", True), ("0", False)])
def test_cudnn_is_used_or_not_or_where_it_is(value, cudnn):
    assert Settings.from_env({**HOME, "ACTORFLOW_CUDNN": value}).cudnn is cudnn


def test_an_empty_value_is_as_good_as_none():
    assert Settings.from_env({v.name: "" for v in ENVIRONMENT} | HOME) == Settings.from_env(HOME)


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/actorflow"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/ann/.cache/actorflow"),
        ({"XDG_CACHE_HOME": ""}, "/home/ann/.cache/actorflow"),
        ({"ACTORFLOW_CACHE": "~"}, "/home/ann"),
        ({"ACTORFLOW_CACHE": "~bob/x"}, "~bob/x"),
        ({"ACTORFLOW_CACHE": "plans", "XDG_CACHE_HOME": "/x"}, "plans"),
    ],
)
def test_the_cache_follows_the_xdg_convention(environ, cache):
    assert Settings.from_env({**HOME, **environ}).cache == Path(cache)


@pytest.mark.parametrize("off", ["off", "OFF"])
def test_the_cache_can_be_turned_off_without_a_warning(off):
    assert Settings.from_env({"ACTORFLOW_CACHE": off}) == Settings()


def test_a_cache_without_a_home_is_off_and_says_so():
    settings = Settings.from_env({})
    assert settings.cache is None
    assert settings.warnings == (
        "the plan cache is off: neither HOME nor XDG_CACHE_HOME is set;"
        " set ACTORFLOW_CACHE to a folder",
    )


def test_the_host_acts_as_many_gpus_as_are_named():
    assert Settings.from_env({**HOME, "ACTORFLOW_CUDA": "emulated:2"}).emulated_gpus == 2


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_flags_that_are_true(text):
    assert Settings.from_env({**HOME, "ACTORFLOW_VERIFY": text}).verify is True


@pytest.mark.parametrize("text", ["0", "False", "no", "off"])
def test_flags_that_are_false(text):
    assert Settings.from_env({**HOME, "ACTORFLOW_VERIFY": text}).verify is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACTORFLOW_VERIFY", "2"),
        ("ACTORFLOW_CUDA", "emulate"),
        ("ACTORFLOW_CUDA", "emulated:0"),
        ("ACTORFLOW_LOG", "debgu"),
        ("ACTORFLOW_LOG", "7"),
        ("ACTORFLOW_TRACEBACK", "long"),
        ("ACTORFLOW_THREADS", "0"),
        ("ACTORFLOW_STALL_SECONDS", "1min"),
        *[("ACTORFLOW_CACHE_SIZE", value) for value in ("0", "1 EB", "-1", "nan", "off")],
        ("ACTORFLOW_SIM_SEED", "-1"),
        *[
            ("ACTORFLOW_LINK", value)
            for value in ("10", "10:", ":5", "0:5", "10:-5", "inf:5", "1e3:5", "10:5:1", "10,5")
        ],
    ],
)
def test_a_value_that_means_nothing_names_variable_value_and_choice(name, value):
    with raises(SettingsError):
        Settings.from_env({**HOME, name: value})


@pytest.mark.parametrize("value", ["-1", "1.5", "two", "\u0663", "1e3", "+2"])
def test_threads_are_plain_digits(value):
    with raises(SettingsError):
        Settings.from_env({**HOME, "ACTORFLOW_THREADS": value})


@pytest.mark.parametrize(
    ("value", "size_bytes"), [("", 1 << 30), ("600 MiB", 600 << 20), ("2GB", 2 * 10**9), ("7", 7)]
)
def test_the_size_of_the_cache_is_in_bytes_or_a_unit(value, size_bytes):
    settings = Settings.from_env({**HOME, "ACTORFLOW_CACHE_SIZE": value})
    assert settings.cache_bytes == size_bytes


@pytest.mark.parametrize(("value", "seconds"), [("0", 0.0), (" 7 ", 7.0), ("", 60.0), (".5", 0.5)])
def test_stall_seconds_may_be_a_fraction_and_0_is_never(value, seconds):
    assert Settings.from_env({**HOME, "ACTORFLOW_STALL_SECONDS": value}).stall_seconds == seconds


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e9", "1.2.3", ".", "\u0663"])
def test_stall_seconds_are_a_plain_number(value):
    with raises(SettingsError):
        Settings.from_env({**HOME, "ACTORFLOW_STALL_SECONDS": value})


def test_unknown_names_are_warned_of_with_the_nearest_known_name():
    settings = Settings.from_env({**HOME, "ACTORFLOW_CAHCE": "x", "ACTORFLOW_Q": "", "OTHER": "1"})
    assert len(settings.warnings) == 2
    assert settings.warnings[0] == (
        "ACTORFLOW_CAHCE is set, and no such setting exists; did you mean ACTORFLOW_CACHE?"
    )
    assert "known are ACTORFLOW_DEVICE, ACTORFLOW_DEBUG" in settings.warnings[1]


def test_log_levels_are_names_that_logging_knows():
    for level in ("debug", "info", "warning", "error"):
        name = Settings.from_env({**HOME, "ACTORFLOW_LOG": level}).log_level
        assert isinstance(logging.getLevelNamesMapping()[name], int)


def test_settings_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Settings().verify = True


def test_the_table_has_a_row_for_each_variable():
    header, rule, *rows = environment_table().splitlines()
    assert header.count("|") == rule.count("|") == 4
    assert [row.split("`")[1] for row in rows] == [v.name for v in ENVIRONMENT]
    assert all(row.count("|") == 4 for row in rows)
    assert "| unset |" in rows[1]
