"""What shells read to complete commands and options."""

import shutil
import subprocess

import pytest

from actorflow.cli.main import main


@pytest.fixture
def text(capsys):
    def of(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return of


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["la"], ["launch"]),
        (["plan", "--me"], ["--memory"]),
        (["ckpt", "ver"], ["verify"]),
        (["simulate", "train.py", "--no-cal"], ["--no-calibrate"]),
        (["launch", "--rest"], ["--restarts", "--restart-window"]),
        (["nothing", "xyz"], []),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_offers_the_words_that_the_parser_has(text, tmp_path, words, expected):
    file = tmp_path / "completion"
    file.write_text(text("bash"))
    line = " ".join(["actorflow", *words])
    program = f"""
    source {file}
    COMP_WORDS=({line}); COMP_CWORD={len(words)}
    _actorflow
    printf "%s\\n" "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
    assert done.stderr == ""


def test_zsh_reads_what_bash_does_and_fish_has_a_line_for_each_word(text):
    assert text("zsh").endswith(text("bash"))
    lines = text("fish").splitlines()
    launch = "-a 'launch' -d 'run a script as several ranks: processes of one job'"
    assert any([line.endswith(launch) for line in lines])
    seen = "'__fish_seen_subcommand_from plan'"
    assert f"complete -c actorflow -n {seen} -a '--memory'" in lines


def test_another_shell_is_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["completion", "tcsh"])
    assert "bash" in capsys.readouterr().err
