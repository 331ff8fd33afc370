"""The decorator: trace, compile, run; what a call asks of its plan."""
