"""What functions and layers take, read from their code."""

import inspect
from inspect import isfunction

import actorflow as af
from actorflow import nn
from actorflow.tensor.arguments import parameters_of


def functions_and_layers():
    """Return the public functions, and what layers take to be made and called."""
    found = [f for room in (af, af.linalg, af.fft) for f in vars(room).values() if isfunction(f)]
    layers = [layer for layer in vars(nn).values() if isinstance(layer, type)]
    named = [vars(layer).get(name) for layer in layers for name in ("__init__", "__call__")]
    return found + [function for function in named if isfunction(function)]


def test_parameters_are_those_of_the_signature():
    for function in functions_and_layers():
        parameters = inspect.signature(function).parameters.values()
        names = {kind: [p.name for p in parameters if p.kind == kind] for kind in range(5)}
        told = parameters_of(function)
        assert [*told.by_place] == names[0] + names[1], function
        assert [told.rest] * bool(told.rest) == names[2], function
        assert [*told.by_name] == names[3], function
        assert told.takes_any_name == bool(names[4]), function
        for parameter in parameters:
            if parameter.annotation is not parameter.empty:
                assert told.annotations[parameter.name] == parameter.annotation, function
