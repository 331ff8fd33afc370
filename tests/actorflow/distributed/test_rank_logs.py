"""What ranks print, in a file for each: whole, and its end where a rank fails."""

from contextlib import closing

import pytest
from launching import end_of, launcher

from actorflow.distributed.rank_process import MOST_LINES, LogTail

SCRIPT = """
import os, sys
from actorflow.distributed.member import current_rank

rank = current_rank().rank
for line in range(100):
    print("line", line, "of rank", rank)
print("to stderr", file=sys.stderr)
current_rank().all_gather_object("print", None)
if rank == 2:
    os._exit(3)
"""


def test_each_rank_above_0_writes_a_file_of_its_own(tmp_path):
    folder = tmp_path / "logs" / "new"
    with launcher(tmp_path) as start:
        code, out, err = end_of(start(SCRIPT, n=3, ACTORFLOW_LOG_DIR=str(folder)))
    assert code == 3
    assert out.splitlines()[-1] == "line 99 of rank 0"
    assert sorted(file.name for file in folder.iterdir()) == ["rank-1.log", "rank-2.log"]
    for rank in (1, 2):
        head, *lines = (folder / f"rank-{rank}.log").read_text().splitlines()
        assert head.startswith(f"--- rank {rank} of 3 on ")
        assert [line for line in lines if line.startswith("line")] == [
            f"line {n} of rank {rank}" for n in range(100)
        ]
        assert "to stderr" in lines
    assert "--- what rank 2 printed last:" in err
    assert "line 99 of rank 2" in err
    logs = f"{folder}/rank-1.log to rank-2.log"
    assert err.splitlines()[-1] == f"what ranks above 0 printed is in {logs}"


def test_a_folder_that_cannot_be_made_is_the_error_of_the_launch(tmp_path):
    (tmp_path / "file").write_text("")
    with launcher(tmp_path) as start:
        folder = tmp_path / "file" / "logs"
        code, out, err = end_of(start(SCRIPT, ACTORFLOW_LOG_DIR=str(folder)))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "actorflow: rank 1 of 2 cannot be started: [Errno 20] Not a directory:"
        f" '{folder}'; those that were are ended again"
    )


@pytest.mark.parametrize("num_lines", [0, 1, MOST_LINES, MOST_LINES + 1])
def test_the_end_of_a_file_is_that_of_this_start_alone(tmp_path, num_lines):
    file = tmp_path / "rank-1.log"
    file.write_text("of a start before\n")
    with closing(LogTail(file)) as tail:
        lines = [f"line {n}" for n in range(num_lines)]
        with file.open("a") as log:
            log.writelines([f"{line}\n" for line in lines])
        assert not tail.read()
        tail.drain()
        shown = tail.text().splitlines()
    assert shown[-MOST_LINES:] == lines[-MOST_LINES:]
    assert len(shown) == min(num_lines, MOST_LINES + 1)
