"""`python -m actorflow` is the command line."""

import sys

from actorflow.cli import main

sys.exit(main())
