"""Checkpoints that survive a kill: shards, manifest, commit."""
