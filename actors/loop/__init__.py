"""The only I/O: a bound plan, its threads, admission, watchdog, timeline."""
