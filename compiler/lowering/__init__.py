"""From ordered graphs to the tables of a plan.

Chains, streams, actors, ports, snapshots, buckets of collectives.
"""
