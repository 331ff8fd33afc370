import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from actors.kernels.common.files import read_object, replace_object
from actors.kernels.common.gemm import gemm_of, view_of_array
from actors.kernels.library import tuning
from actors.kernels.library.tuning import ProductTable
from actors.kernels.native.matmul import LIBRARIES


def gemm(m=128, k=128, n=128):
    a, b, out = [np.empty(shape, np.float32) for shape in ((m, k), (k, n), (m, n))]
    return gemm_of(*map(view_of_array, (a, b, out)))


@pytest.fixture
def folder(native, tmp_path, untuned):
    """Where the table of this test is."""
    tuning.configure(tmp_path, deterministic=False)
    return tmp_path


@pytest.fixture
def forget(untuned):
    """Return a function that makes this process a new one, with its table in a folder."""

    def begin(folder):
        untuned()
        tuning.configure(folder, deterministic=False)

    return begin


@pytest.fixture
def measured(monkeypatch):
    """The products that were measured; the last library wins."""
    keys = []

    def stub(gemm, libraries):
        keys.append(gemm.key)
        return libraries[-1].name

    monkeypatch.setattr(tuning, "_measured", stub)
    return keys


def test_a_product_is_measured_once_and_remembered_by_the_next_process(folder, measured, forget):
    first = tuning.library_for(gemm(), LIBRARIES)
    assert tuning.library_for(gemm(), LIBRARIES) == first
    forget(folder)
    assert tuning.library_for(gemm(), LIBRARIES) == first
    assert measured == [gemm().key]


def test_the_rule_measures_nothing_and_writes_nothing(folder, measured):
    tuning.configure(folder, deterministic=True)
    assert tuning.library_for(gemm(), LIBRARIES) is not None
    assert tuning.library_for(gemm(16, 16, 16), LIBRARIES) == "c"
    assert tuning.library_for(gemm(n=10), LIBRARIES) == "c"
    assert tuning.library_for(gemm(n=1), LIBRARIES).startswith("openblas")
    assert measured == []
    assert list(folder.iterdir()) == []
    assert tuning.epoch() == "rule"


def test_after_retune_everything_is_measured_anew_in_another_epoch(folder, measured, forget):
    tuning.library_for(gemm(), LIBRARIES)
    before = tuning.epoch()
    tuning.retune()
    assert tuning.epoch() != before
    tuning.library_for(gemm(), LIBRARIES)
    assert len(measured) == 2
    epoch = tuning.epoch()
    forget(folder)
    assert tuning.epoch() == epoch


ABSURD = ["", "{", '{"epoch": 0, "products": {}}', "\x00\xff", "[" * 100_000]


@pytest.mark.parametrize("text", ABSURD, ids=lambda text: text[:40])
def test_an_absurd_file_is_measured_anew_with_one_line_and_replaced(
    folder, measured, text, caplog, forget
):
    tuning.library_for(gemm(), LIBRARIES)
    (file,) = folder.iterdir()
    file.write_text(text, encoding="latin-1")
    forget(folder)
    tuning.library_for(gemm(), LIBRARIES)
    tuning.library_for(gemm(64, 64, 64), LIBRARIES)
    assert len(measured) == 3
    assert gemm().key in read_object(file, ProductTable).products
    assert len(caplog.records) == 1
    assert f"{file} is damaged" in caplog.text
    assert "matrix products are measured again" in caplog.text


def a_directory(file):
    file.mkdir()


def a_pipe(file):
    os.mkfifo(file)


def a_loop(file):
    file.symlink_to(file)


@pytest.mark.parametrize("put", [a_directory, a_pipe, a_loop])
def test_what_is_no_file_costs_a_measurement_and_one_line(folder, measured, put, caplog, forget):
    tuning.library_for(gemm(), LIBRARIES)
    (file,) = folder.iterdir()
    file.unlink()
    put(file)
    forget(folder)
    for _ in range(2):
        tuning.library_for(gemm(), LIBRARIES)
        tuning.library_for(gemm(64, 64, 64), LIBRARIES)
    assert len(measured) == 3
    assert len(caplog.records) == 1
    assert list(folder.iterdir()) == [file], "nothing is left behind"


def test_a_library_that_is_gone_is_not_taken_from_the_table(folder, measured, forget):
    tuning.library_for(gemm(), LIBRARIES)
    (file,) = folder.iterdir()
    content = read_object(file, ProductTable)
    replace_object(file, replace(content, products=dict.fromkeys(content.products, "somebody")))
    forget(folder)
    assert tuning.library_for(gemm(), LIBRARIES) in [library.name for library in LIBRARIES]


def test_what_another_process_found_meanwhile_is_kept(folder, measured):
    tuning.library_for(gemm(), LIBRARIES)
    (file,) = folder.iterdir()
    content = read_object(file, ProductTable)
    replace_object(file, replace(content, products={**content.products, "theirs": "c"}))
    tuning.library_for(gemm(64, 64, 64), LIBRARIES)
    assert set(read_object(file, ProductTable).products) >= {"theirs", gemm().key}


def test_a_folder_that_cannot_be_written_costs_a_measurement_and_no_more(folder, measured, forget):
    (folder / "file").write_text("")
    forget(folder / "file" / "below")
    assert tuning.library_for(gemm(), LIBRARIES) == tuning.library_for(gemm(), LIBRARIES)
    assert len(measured) == 1


def test_a_measurement_names_one_of_the_libraries_asked(folder, monkeypatch):
    monkeypatch.setattr(tuning, "BUDGET_NS", 1)
    found = tuning.library_for(gemm(40, 40, 40), LIBRARIES)
    assert found in [library.name for library in LIBRARIES]


def test_a_product_is_not_charged_with_waking_the_threads_of_the_pool(folder, monkeypatch):
    """Of two products the faster one is on two threads, of which one sleeps between two looks."""
    now_ns, is_awake = 0, False

    def looked():
        nonlocal is_awake
        is_awake = False
        return 0

    def launch_of(library, *_):
        def launch():
            nonlocal now_ns, is_awake
            is_alone = library.name.startswith("openblas")
            now_ns += 36_000 if is_alone else 28_000 + 50_000 * (not is_awake)
            is_awake = True

        return launch

    clock = SimpleNamespace(perf_counter_ns=lambda: now_ns, process_time_ns=lambda: 2 * now_ns)
    fakes = {"time": clock, "_waited_ns": looked, "gemm_launch": launch_of}
    for name, fake in fakes.items():
        monkeypatch.setattr(tuning, name, fake)
    found = tuning.library_for(gemm(4, 512, 512), LIBRARIES)
    assert found is not None
    assert not found.startswith("openblas")


@pytest.mark.parametrize(
    ("duration", "busy", "waited", "found"),
    [
        (2000, 4000, 0, 2000),  # nobody waited
        (2000, 2100, 0, 2000),  # half of the time was not added yet
        (2300, 2300, 800, 1500),  # nor here, where a thread waited
        (4000, 4000, 4000, 2000),  # one thread waited all the time: the other did its part
        (3000, 4000, 1000, 2000),
        (2000, 9000, 1000, 2000),  # threads that spin
    ],
)
def test_a_disturbed_launch_takes_what_it_would_without_waits(duration, busy, waited, found):
    assert tuning.undisturbed_ns(duration, busy, waited, 2) == found


def test_two_cuts_into_the_same_chunks_are_asked_once(folder):
    names = [library.name for library in tuning._distinct(gemm(64, 64, 64), LIBRARIES)]
    assert len([name for name in names if name.startswith("openblas")]) == 1


def test_what_another_process_measured_first_is_taken_over_before_the_answer(folder, monkeypatch):
    """A rival writes its table while the product is being measured."""

    def rival(gemm, libraries):
        replace_object(tuning._file(), ProductTable(0, {gemm.key: libraries[0].name}))
        return libraries[-1].name

    monkeypatch.setattr(tuning, "_measured", rival)
    taken = tuning._distinct(gemm(), LIBRARIES)
    assert taken[0].name != taken[-1].name
    assert tuning.library_for(gemm(), LIBRARIES) == taken[0].name
    (file,) = folder.iterdir()
    assert read_object(file, ProductTable).products == {gemm().key: taken[0].name}
