"""Rewrites of the logical graph, one file each.

Each is a pure and deterministic `run(graph, facts) -> Graph`.
`compiler.pipeline.pipeline` lists them in the order they run.
"""
