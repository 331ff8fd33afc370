"""Optimizers, parameter groups and learning-rate schedules.

An optimizer is a recipe: while a training job is traced it declares its state as variables and says
which update op changes each parameter. A schedule is a pure function of the step, traced into the
graph like anything else, so there is nothing of it to checkpoint. Two are run by the host, between
steps: what they do next depends on numbers of the steps before.

recipes.py     what optimizers have in common; `group` and `on`, for parameters chosen by path
optimizers.py  SGD, Adam, AdamW and others, each a dataclass of its settings; EMA of weights
schedules.py   constant, cosine, warmup and others: the learning rate from the step
plateau.py     ReduceLROnPlateau: a rate that the host lowers, in a buffer of the model
lbfgs.py       LBFGS, which the host runs, over gradients that a job computes

May import actorflow.{environment, functional, tensor}, compiler.contract, compiler.graph and
compiler.ops.{families, language}. Begin reading at recipes.py: a new optimizer is a subclass of
`RecipeOptimizer` with its settings and one method.
"""

from typing import TYPE_CHECKING

from actorflow.optim.lbfgs import LBFGS as LBFGS
from actorflow.optim.optimizers import EMA as EMA
from actorflow.optim.optimizers import LAMB as LAMB
from actorflow.optim.optimizers import SGD as SGD
from actorflow.optim.optimizers import Adafactor as Adafactor
from actorflow.optim.optimizers import Adagrad as Adagrad
from actorflow.optim.optimizers import Adam as Adam
from actorflow.optim.optimizers import AdamW as AdamW
from actorflow.optim.optimizers import Lion as Lion
from actorflow.optim.optimizers import Muon as Muon
from actorflow.optim.optimizers import RMSprop as RMSprop
from actorflow.optim.plateau import ReduceLROnPlateau as ReduceLROnPlateau
from actorflow.optim.recipes import Group as Group
from actorflow.optim.recipes import Optimizer as Optimizer
from actorflow.optim.recipes import OptimizerPart as OptimizerPart
from actorflow.optim.recipes import group as group
from actorflow.optim.recipes import on as on
from actorflow.optim.schedules import Schedule as Schedule
from actorflow.optim.schedules import chain as chain
from actorflow.optim.schedules import constant as constant
from actorflow.optim.schedules import cosine as cosine
from actorflow.optim.schedules import cosine_restarts as cosine_restarts
from actorflow.optim.schedules import exponential as exponential
from actorflow.optim.schedules import linear as linear
from actorflow.optim.schedules import multi_step as multi_step
from actorflow.optim.schedules import one_cycle as one_cycle
from actorflow.optim.schedules import polynomial as polynomial
from actorflow.optim.schedules import step as step
from actorflow.optim.schedules import warmup as warmup
from actorflow.optim.schedules import wsd as wsd
from actorflow.tensor.habits import OPTIM_HINTS, hinting

if not TYPE_CHECKING:  # which would take any attribute for one that is there
    __getattr__ = hinting(__name__, OPTIM_HINTS)
