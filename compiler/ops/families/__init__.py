"""The ops that are programs or compositions of ops, one file per family.

A new activation goes here.
"""
