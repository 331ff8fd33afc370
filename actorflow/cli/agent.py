"""The process of an agent: `python -m actorflow.cli.agent FD PARENT`.

`actorflow.distributed.agent.start_agent` starts it; FD holds its keys. It is killed with the thread
of PARENT that started it, and its ranks with it.
"""

from __future__ import annotations

import os
import sys

from actorflow.cli.launched import die_with
from actorflow.distributed.agent import serve_agent
from actorflow.distributed.agent_messages import AgentKeys
from actorflow.distributed.messages import read_keys_fd


def main(arguments: list[str]) -> int:
    """Serve the launcher, and return the exit status of the job."""
    fd, parent = arguments
    die_with(int(parent))
    return serve_agent(AgentKeys.from_bytes(read_keys_fd(int(fd))), os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
