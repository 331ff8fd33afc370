import os
import sys

import pytest

from actorflow.environment import host
from actorflow.environment.host import busy_cores, examine, is_writable


def test_this_machine_can_be_examined_without_waiting():
    waits = []
    seen = examine({"HOME": "/nowhere"}, wait=waits.append)
    assert seen.python == sys.version_info[:3]
    assert seen.num_cores >= 1
    assert seen.packages["numpy"]
    assert seen.free_blas is None
    assert sum(waits) < 1


def test_a_child_is_started_only_if_a_variable_could_hold_blas_back(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "blas_without_variables", asked.append)
    examine({}, wait=lambda seconds: None)
    examine({"OPENBLAS_CORETYPE": ""}, wait=lambda seconds: None)
    assert asked == []
    examine({"OMP_NUM_THREADS": "1"}, wait=lambda seconds: None)
    assert asked == [{"OMP_NUM_THREADS": "1"}]


def test_a_setting_that_means_nothing_does_not_stop_the_examination():
    assert examine({"ACTORFLOW_THREADS": "x"}, wait=lambda seconds: None).cache_is_writable


def test_busy_cores_leave_out_idle_iowait_and_guest():
    before = "cpu  100 10 50 1000 500 5 5 2 70 7\ncpu0 1 2 3\n"
    after = "cpu  110 12 56 9000 900 6 8 3 90 9\ncpu0 9 9 9\n"
    assert busy_cores(before, after, 20) == pytest.approx((10 + 2 + 6 + 1 + 3 + 1) / 20)
    assert busy_cores(after, before, 20) == 0.0


def test_an_old_kernel_with_fewer_columns_is_read():
    assert busy_cores("cpu 1 1 1 1\n", "cpu 2 2 2 9\n", 3) == pytest.approx(1.0)


def test_a_folder_that_could_be_made_is_writable_and_is_not_made(tmp_path):
    assert is_writable(tmp_path)
    assert is_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_folder_under_a_file_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("")
    assert not is_writable(tmp_path / "file")
    assert not is_writable(tmp_path / "file" / "below")


def test_a_folder_without_permission_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    assert not is_writable(tmp_path / "a")
