"""Which values share bytes, what runs per batch and per step, order of nodes.

Launches before they have a place.
"""
