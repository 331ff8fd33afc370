"""`actorflow.functional` under torch's name: `import actorflow.nn.functional as F`."""

from typing import TYPE_CHECKING

from actorflow.functional import *  # noqa: F403  # its own __all__ says what

if not TYPE_CHECKING:
    from actorflow.functional import __all__ as __all__
