"""The C compiler: what is kept, what is built again, and what a refusal says."""

import ctypes
import os
import shlex
import shutil
import stat
import tempfile
from dataclasses import replace

import pytest
from error_texts import raises

from actors.kernels.library.toolchain import CompilerError, find_toolchain

ANSWER = '__attribute__((visibility("default"))) int answer(void) { return 42; }\n'


@pytest.fixture
def chain(native_toolchain, tmp_path):
    return replace(native_toolchain, folder=tmp_path / "kept")


def files(chain):
    return sorted(path.name for path in chain.folder.iterdir())


def counting(chain, tmp_path):
    """Return a toolchain whose compiler counts its starts in a file."""
    script = tmp_path / "counting-cc"
    script.write_text(
        f'#!/bin/sh\necho x >> {tmp_path}/starts\nexec {shlex.join(chain.command)} "$@"\n'
    )
    script.chmod(0o755)
    return replace(chain, command=(str(script),))


def starts(tmp_path):
    path = tmp_path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_library_is_built_once_and_kept_by_content(chain, tmp_path):
    counted = counting(chain, tmp_path)
    assert counted.library(ANSWER).answer() == 42
    assert counted.library(ANSWER).answer() == 42
    assert starts(tmp_path) == 1
    assert len(files(counted)) == 1


def test_another_text_is_another_library(chain):
    assert chain.library(ANSWER).answer() == 42
    assert chain.library(ANSWER.replace("42", "43")).answer() == 43
    assert len(files(chain)) == 2


def test_what_was_built_for_another_processor_is_never_loaded(chain, tmp_path):
    """A cache that came from another machine holds instructions that this one may not have."""
    foreign = replace(chain, processor="a processor with an instruction of its own")
    foreign.library(ANSWER)
    kept = files(chain)
    counted = counting(chain, tmp_path)
    assert counted.library(ANSWER).answer() == 42
    assert starts(tmp_path) == 1
    assert len(files(chain)) == len(kept) + 1


def test_another_compiler_version_builds_again(chain):
    chain.library(ANSWER)
    replace(chain, version="another").library(ANSWER)
    assert len(files(chain)) == 2


def test_half_a_file_in_the_cache_is_built_again(chain):
    chain.folder.mkdir(parents=True)
    probe = replace(chain, folder=chain.folder.parent / "probe")
    probe.library(ANSWER)
    (name,) = files(probe)
    (chain.folder / name).write_bytes(b"\x7fELF and no more")
    assert chain.library(ANSWER).answer() == 42
    # The mended file serves the next process.
    assert ctypes.CDLL(str(chain.folder / name)).answer() == 42


def put(path, content):
    """Replace a file: the one that this process has loaded must not change under it."""
    path.unlink()
    path.write_bytes(content)


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: put(path, path.read_bytes()[:-100]), "is damaged"),
        (lambda path: put(path, flipped(path.read_bytes())), "is damaged"),
        (lambda path: put(path, b""), "is damaged"),
        (lambda path: path.chmod(0o666), "others may write"),
        (
            lambda path: path.rename(path.with_name("x")) and path.symlink_to(path.with_name("x")),
            "no plain file",
        ),
    ],
    ids=["cut", "one bit", "empty", "writable", "a link"],
)
def test_a_kept_file_that_is_not_what_was_built_is_built_anew_with_a_line(
    chain, tmp_path, damage, said
):
    told = []
    counted = replace(counting(chain, tmp_path), report=told.append)
    counted.library(ANSWER)
    damage(counted.folder / files(counted)[0])
    for _ in range(2):
        assert counted.library(ANSWER).answer() == 42
    assert starts(tmp_path) == 2
    (line,) = told
    assert said in line
    assert line.endswith("it is not loaded, and built again")


def test_a_file_under_the_name_of_another_is_not_run_in_its_place(chain):
    told = []
    chain = replace(chain, report=told.append)
    other = ANSWER.replace("42", "43")
    for text in (ANSWER, other):
        chain.library(text)
    one, two = [chain.folder / chain._name_of(text) for text in (ANSWER, other)]
    put(one, two.read_bytes())
    assert chain.library(ANSWER).answer() == 42
    assert len(told) == 1


def test_the_folder_is_for_this_user_alone(chain):
    chain.library(ANSWER)
    assert stat.S_IMODE(chain.folder.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_costs_a_build_and_no_more(chain, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert replace(chain, folder=blocked / "below").library(ANSWER).answer() == 42


def test_no_folder_keeps_nothing(chain):
    assert replace(chain, folder=None).library(ANSWER).answer() == 42
    assert not chain.folder.exists()


def test_a_refusal_has_the_words_of_the_compiler(chain):
    with pytest.raises(CompilerError, match=r"ended with status 1.*unknown_word"):
        chain.library("int f(void) { return unknown_word; }\n")
    assert not chain.folder.exists() or not files(chain)


def test_a_compiler_that_cannot_be_started_is_named(chain, tmp_path):
    broken = replace(chain, command=(str(tmp_path / "nowhere"),))
    with raises(CompilerError):
        broken.library(ANSWER)


def test_cc_names_the_compiler(native_toolchain, tmp_path):
    other = tmp_path / "my-compiler"
    shutil.copy("/bin/sh", other)
    other.write_text("#!/bin/sh\necho my compiler 1.0\n")
    other.chmod(0o755)
    found = find_toolchain({"CC": str(other), "PATH": os.environ["PATH"]}, None)
    assert found is not None
    assert (found.command, found.version) == ((str(other),), "my compiler 1.0")


def test_cc_may_have_words_after_the_compiler(chain, tmp_path):
    """As in CC="ccache gcc" or CC="gcc -DANSWER=42": they are part of every call and of the key."""
    plain = find_toolchain({"CC": counting(chain, tmp_path).command[0]}, chain.folder)
    wordy = find_toolchain({"CC": f"{plain.command[0]} '-DANSWER=40 + 2'"}, chain.folder)
    assert wordy.command == (*plain.command, "-DANSWER=40 + 2")
    assert wordy.library(ANSWER.replace("42", "ANSWER")).answer() == 42
    assert wordy.fingerprint != plain.fingerprint
    with pytest.raises(CompilerError, match="ANSWER"):
        plain.library(ANSWER.replace("42", "ANSWER"))


def test_a_quotation_in_cc_without_an_end_names_no_compiler():
    assert find_toolchain({"CC": "gcc '-O2", "PATH": os.environ["PATH"]}, None) is None


def refuse_to_load(monkeypatch, *folders):
    """Let the loader fail for libraries below some folders, as on a file system without exec."""
    real = ctypes.CDLL

    def load(path):
        if any([str(path).startswith(str(folder)) for folder in folders]):
            raise OSError(f"{path}: failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_a_folder_from_which_nothing_may_run_costs_a_build_and_no_more(
    chain, tmp_path, monkeypatch
):
    counted = counting(chain, tmp_path)
    refuse_to_load(monkeypatch, chain.folder)
    for builds in (1, 2):
        assert counted.library(ANSWER).answer() == 42
        assert starts(tmp_path) == builds


def test_a_library_that_can_be_loaded_from_nowhere_is_an_error_with_a_way_out(chain, monkeypatch):
    refuse_to_load(monkeypatch, chain.folder, tempfile.gettempdir())
    with pytest.raises(CompilerError, match=r"native kernels: .*failed to map.*TMPDIR"):
        chain.library(ANSWER)


def test_without_a_temporary_folder_only_what_is_kept_is_loaded(chain, tmp_path, monkeypatch):
    chain.library(ANSWER)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert chain.library(ANSWER).answer() == 42
    others = [ANSWER.replace("42", "43"), ANSWER.replace("42", "44")]
    chain.keep(others, 2)
    with pytest.raises(CompilerError, match=r"native kernels: .*nowhere.*TMPDIR"):
        chain.library(others[0])


def test_a_machine_without_a_compiler_has_none(tmp_path):
    assert find_toolchain({"PATH": str(tmp_path)}, None) is None
    assert find_toolchain({"PATH": str(tmp_path), "CC": "no-such-compiler"}, None) is None


def test_what_is_kept_ahead_is_not_built_again(chain, tmp_path):
    counted = counting(chain, tmp_path)
    texts = [ANSWER, ANSWER.replace("42", "43"), ANSWER.replace("42", "44")]
    counted.keep(texts, 2)
    assert starts(tmp_path) == 3
    assert [counted.library(text).answer() for text in texts] == [42, 43, 44]
    counted.keep(texts, 2)
    assert starts(tmp_path) == 3


def test_a_text_that_is_refused_ahead_is_refused_when_it_is_asked_for(chain):
    bad = "int f(void) { return unknown_word; }\n"
    chain.keep([ANSWER, bad], 2)
    assert chain.library(ANSWER).answer() == 42
    with pytest.raises(CompilerError, match="unknown_word"):
        chain.library(bad)


BOTH = ANSWER + ANSWER.replace("42", "43").replace("answer", "other")


def test_a_library_is_found_by_each_text_that_it_is_noted_to_have(chain):
    parts = [ANSWER, ANSWER.replace("42", "43").replace("answer", "other")]
    chain.library(BOTH)
    assert [chain.home_of(text) for text in parts] == [None, None]
    chain.note_home(BOTH, parts)
    (home,) = {chain.home_of(text) for text in parts}
    library = chain.kept_library(home)
    assert (library.answer(), library.other()) == (42, 43)
    # One that has the text alone comes first, and one of another processor is none.
    chain.library(ANSWER)
    assert chain.home_of(ANSWER) not in (None, home)
    assert replace(chain, processor="another").home_of(parts[1]) is None
    assert replace(chain, folder=None).home_of(ANSWER) is None


def test_a_note_that_is_damaged_or_leads_nowhere_finds_no_library(chain):
    told = []
    chain = replace(chain, report=told.append)
    chain.library(BOTH)
    chain.note_home(BOTH, [ANSWER])
    home = chain.home_of(ANSWER)
    (chain.folder / home).unlink()
    assert chain.kept_library(home) is None
    (note,) = chain.folder.glob("*.home")
    put(note, flipped(note.read_bytes()))
    assert told == []
    assert chain.home_of(ANSWER) is None
    assert len(told) == 1
