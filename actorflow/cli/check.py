"""The script that `actorflow launch --check` runs in place of the user's, as one rank per host.

`check.py SCRIPT DIRECTORY`: DIRECTORY is the run directory, or "" where none is tried. The table
goes to stdout. What is wrong is the error of the job, which the launcher shows once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from actorflow.distributed.host_check import check_hosts, check_table, findings
from actorflow.distributed.member import current_rank
from compiler.contract.errors import ActorflowError

MOST_S = 10.0
"""How long hosts wait for each other, where ACTORFLOW_RANK_SECONDS is not set."""


def main(script: str, directory: str) -> None:
    """Check the hosts of this job. Raises ActorflowError on rank 0 where something is wrong."""
    member = current_rank()
    rank = 0 if member is None else member.rank
    # A single host has nobody to meet, and all else to be looked at.
    gather = _alone if member is None else member.all_gather_object
    reports = check_hosts(rank, gather, Path(script), Path(directory) if directory else None)
    if rank != 0:
        return
    print("\n".join(check_table(reports)), flush=True)
    found = findings(reports, directory)
    wrong = [finding for finding in found if not finding.is_warning]
    hosts = "1 host" if len(reports) == 1 else f"{len(reports)} hosts"
    if wrong:
        text = "\n".join(map(str, found))
        raise ActorflowError(f"the check of {hosts} found what is wrong:\n{text}")
    print("\n".join([*map(str, found), f"{hosts} checked: ready"]))


def _alone(name: str, value: Any) -> list[Any]:
    return [value]


if __name__ == "__main__":
    main(*sys.argv[1:])
