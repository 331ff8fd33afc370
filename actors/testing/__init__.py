"""Development: every order of events, dependencies taken away, mutants, devices late on purpose."""
