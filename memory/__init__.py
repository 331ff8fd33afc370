"""Arithmetic on intervals, bytes and tokens.

Live ranges, offsets, order, rates and slots, proofs of all that.
"""
