"""The symbolic tensor, the trace that records it, numbers and dtypes, devices and layouts.

First values.
"""
