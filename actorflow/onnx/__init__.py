"""Models of ONNX: read into a module, written from a job, and run as a backend of ONNX.

A model that is read becomes a module: its float initialisers are parameters, and its nodes are
called when a job is traced, as a user calls functions. A job is written from its logical graph,
before any pass. What is not known, of either, is refused by name, and nothing is guessed. The
package onnx is an extra, which only this room imports, late.

program.py      steps and blocks as plain Python, and how a step is bound to an operator
reading.py      a file, with bounds, as a block; what ONNX's own reference makes of known numbers
module.py       `load`, and `OnnxModule`, which calls the steps
elementwise.py  operators by elements, and constants of shapes
arranging.py    operators that move and pick elements, and those over axes
layers.py       products, convolutions, pools, norms, losses, resizing
attention.py    attention, rotary positions, the rules of ONNX's training domain
control.py      branches, loops and scans, recurrent layers
exporting.py    `export`: the model, its weights and the files
forms.py        ops that are one operator of ONNX: products, biases, batch norms
emitting.py     how each op of a graph is written
graph_writer.py nodes, constants and names of a graph that is written
extents.py      extents that follow from named axes, found by traces at several sizes
backend.py      actorflow as `onnx.backend.base.Backend`; imported by nobody here

May import actorflow.jobs and what is below it. Begin reading at module.py.
"""

from actorflow.onnx.exporting import export as export
from actorflow.onnx.module import OnnxModule as OnnxModule
from actorflow.onnx.module import load as load
from actorflow.onnx.program import OnnxError as OnnxError
