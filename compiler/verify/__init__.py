"""Every proof about a plan but that its tables fit (contract/plan).

Versions, shared bytes, all ranks together.
"""
