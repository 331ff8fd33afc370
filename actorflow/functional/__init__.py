"""Functions on tensors. Names, arguments and semantics are torch's, else numpy's.

- `shape`: cutting, joining and moving elements; `arranging`: repeated, turned, in windows;
  `creating`: of numbers that the job knows; `reduce`: over axes.
- `elementwise`: arithmetic and analysis of each element; `activation`: nonlinearities.
- `comparison`: what elements are, and logic; `rounding`: whole numbers and bounds.
- `indexing`: elements by tensors of integers, taken, put and added; `row_numbers`: which those are.
- `dense`, `tables`, `attending`, `normalisation`: what layers compute; `loss`,
  `classification`, `ctc`: what is minimised.
- `by_channel`: normalisation over batch and places.
- `products`: of vectors, matrices, and by Einstein's convention.
- `control`: functions that run functions, step by step; `trees`: what those take and return.
- `convolution`, `pooling`: over the windows of images; `patches`: these as columns; `resize`.
- `sorting`: order and the largest; `cumulative`: sums and products up to each element.
- `random`: numbers that follow from the seed and the step; `counters`: what the engine counts.
- `names`, `methods`: what arguments are called, and which functions tensors have as methods.

Each file says in its `__all__` what it hands on.
"""

from actorflow.doors import checked
from actorflow.functional import (
    activation,
    arranging,
    attending,
    by_channel,
    classification,
    comparison,
    control,
    convolution,
    creating,
    ctc,
    cumulative,
    dense,
    elementwise,
    indexing,
    loss,
    normalisation,
    patches,
    pooling,
    products,
    random,
    reduce,
    resize,
    rounding,
    shape,
    sorting,
    tables,
)
from actorflow.functional.activation import *
from actorflow.functional.arranging import *
from actorflow.functional.attending import *
from actorflow.functional.by_channel import *
from actorflow.functional.classification import *
from actorflow.functional.comparison import *
from actorflow.functional.control import *
from actorflow.functional.convolution import *
from actorflow.functional.creating import *
from actorflow.functional.ctc import *
from actorflow.functional.cumulative import *
from actorflow.functional.dense import *
from actorflow.functional.elementwise import *
from actorflow.functional.indexing import *
from actorflow.functional.loss import *
from actorflow.functional.normalisation import *
from actorflow.functional.patches import *
from actorflow.functional.pooling import *
from actorflow.functional.products import *
from actorflow.functional.random import *
from actorflow.functional.reduce import *
from actorflow.functional.resize import *
from actorflow.functional.rounding import *
from actorflow.functional.shape import *
from actorflow.functional.sorting import *
from actorflow.functional.tables import *

__all__: list[str] = []
__all__ += activation.__all__
__all__ += arranging.__all__
__all__ += attending.__all__
__all__ += by_channel.__all__
__all__ += classification.__all__
__all__ += creating.__all__
__all__ += cumulative.__all__
__all__ += control.__all__
__all__ += convolution.__all__
__all__ += comparison.__all__
__all__ += dense.__all__
__all__ += elementwise.__all__
__all__ += indexing.__all__
__all__ += loss.__all__
__all__ += normalisation.__all__
__all__ += pooling.__all__
__all__ += products.__all__
__all__ += random.__all__
__all__ += reduce.__all__
__all__ += rounding.__all__
__all__ += shape.__all__
__all__ += ctc.__all__
__all__ += patches.__all__
__all__ += resize.__all__
__all__ += sorting.__all__
__all__ += tables.__all__
for _name in __all__:  # within the house functions call one another without a door
    globals()[_name] = checked(globals()[_name])
