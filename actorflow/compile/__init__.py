"""From a graph to a plan that this machine can run.

- `job_options`: what `@af.job` takes; `compiling`: a plan from the cache, or compiled.
- `capture`: a script's plan in place of its run.
- `plan_cache`: plans on disk.
- `targets`: the host's kernels as the compiler asks for them; `native` turns the compiled ones on.
- `host`: what can be seen of the machine.
"""
