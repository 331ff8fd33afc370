"""What the process is told and what the machine has.

Settings, log, options checked, cores, GPUs, native kernels.
"""
