"""`python -m actorflow` is the command line."""

import sys

from actorflow.cli.main import main

sys.exit(main())
