"""Checkpoints that survive a kill and a power cut: shards, manifest, commit.

A run directory holds one folder per checkpoint: shards in the safetensors format, and a manifest
with the hash of each piece of a tensor and the state of the run. One process writes all, or each of
several its pieces. A folder gets its final name only after all of it is durable. A reader takes the
newest checkpoint whose every byte, of what it needs, is right.

manager.py     the commit protocol, and `CheckpointManager`, the one writer of a run directory
reader.py      `CheckpointReader`: list, verify and load, without a lock
manifest.py    manifest.json: encoder, strict parser, and what a job expects of a checkpoint
shard.py       tensor files: planned, written and read in chunks, hashed on the way
weights.py     `load` and `save`: weights of any origin, by the safetensors library's reader
fs.py          `Fs`, all calls to the disk; names in a run directory; `WriterLock`
errors.py      `CheckpointError` and its family; `Every`, when a checkpoint is due

May import compiler.contract and memory. Must not import another room of actorflow: checkpoints know
arrays by name, and neither models nor jobs. Nothing but `Fs` writes to the disk, so that tests
can cut the power at every call.

Begin reading at manager.py, whose first comment states the protocol line by line.
"""
