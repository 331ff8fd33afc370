"""Mutants of plan files: five plans with all features, how they are changed, and who runs them.

subjects   the plans, and the data they train on
mutants    one change of a plan's bytes or of its rows, from a seed
trial      decode, prove, run two steps, compare; one mutant after another in a child process
"""
