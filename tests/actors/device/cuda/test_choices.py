"""Choices of algorithms outlive a process, and follow whoever was first."""

import logging

from actors.device.cuda.cublaslt import ProductChoices

ONE, OTHER = bytes(64), bytes([7] * 64)


def test_a_choice_is_found_by_another_process(tmp_path):
    assert ProductChoices(tmp_path, "a").keep("product", ONE) == ONE
    assert ProductChoices(tmp_path, "a").get("product") == ONE


def test_another_library_or_gpu_has_choices_of_its_own(tmp_path):
    ProductChoices(tmp_path, "a").keep("product", ONE)
    assert ProductChoices(tmp_path, "b").get("product") is None


def test_the_first_to_keep_is_followed(tmp_path):
    late = ProductChoices(tmp_path, "a")
    assert late.get("product") is None
    ProductChoices(tmp_path, "a").keep("product", ONE)
    assert late.keep("product", OTHER) == ONE
    assert late.keep("other", OTHER) == OTHER
    assert ProductChoices(tmp_path, "a").get("product") == ONE


def test_a_damaged_file_is_said_and_written_anew(tmp_path, caplog):
    choices = ProductChoices(tmp_path, "a")
    choices.keep("product", ONE)
    choices.file.write_bytes(b"{" + choices.file.read_bytes()[1:-3])
    with caplog.at_level(logging.WARNING):
        assert ProductChoices(tmp_path, "a").get("product") is None
    assert "products are timed again" in caplog.text
    ProductChoices(tmp_path, "a").keep("product", OTHER)
    assert ProductChoices(tmp_path, "a").get("product") == OTHER


def test_without_a_folder_choices_last_as_long_as_the_process():
    choices = ProductChoices(None, "a")
    assert choices.get("product") is None
    assert choices.keep("product", ONE) == ONE
    assert choices.get("product") == ONE


def test_a_folder_that_cannot_be_written_costs_a_trial(tmp_path):
    (tmp_path / "file").write_text("no folder")
    choices = ProductChoices(tmp_path / "file", "a")
    assert choices.keep("product", ONE) == ONE
