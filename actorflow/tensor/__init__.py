"""The symbolic tensor, and the trace that records what a job's function computes with it.

While a job is traced its function runs once with `Tensor`s. Each operation emits a node into the
graph builder of the current `Trace`, with the user's own line and the device and the stage of the
region it stands in.

tensor.py          `Tensor`, `apply`, the table METHODS
arguments.py       `validate_arguments` of public functions and layers
tracer.py          `Trace`; the user's line that messages name; a function's code by content
calls.py           which functions a trace calls, and where that is not recorded
literals.py        numbers, sizes and dtypes checked; the dtype that operands meet in
op_math.py         `in_float32`: composed functions of 16-bit floats compute in float32
gradient_rules.py  gradients of ops that are written over tensors
layouts.py         af.Mesh and sbp=, af.device and x.to, af.stage, af.precision
probes.py          what a print, a check or a breakpoint does with arrays
initial_values.py  the first value of each variable, from the seed and its name

May import compiler.contract, compiler.graph and compiler.ops.{families, language, primitives}. Must
not import functional, which fills the table METHODS, nor nn or any room above.

Begin reading at tensor.py: a `Tensor` is what a user's function is given.
"""
