"""Checkpoints that survive a kill, a power cut, a full disk and a flipped bit.

A run directory holds one directory per checkpoint, and nothing that points at "the latest": the
directory listing is the only truth.

    runs/demo/  .lock
                step-0000000500/{model-00001.safetensors, optim-00001.safetensors, manifest.json}
                .tmp-0000001000-<attempt>/         being written: not a checkpoint yet
                .aside-step-0000000500-<attempt>/  being replaced by another version
                .trash-step-0000000250-<attempt>/  being deleted: no checkpoint any more

The map, in the order of imports:

- `errors`: the `CheckpointError` family, and which of them an `OSError` becomes.
- `fs`: the one door to the disk (`Fs`) and which file names pass it.
- `layout`: the names inside a run directory.
- `lock`: `WriterLock`: who may write, and whether the path still leads to what is locked.
- `shard`: safetensors files, written and read in chunks, hashed on the way.
- `manifest`: what a checkpoint says about itself, with its own hash; a strict parser.
- `expected`: what a job expects of a checkpoint, held against a manifest before anything is read.
- `reader`: list, verify, load; needs no lock and creates nothing.
- `commit`: the commit protocol: how a checkpoint comes to be, and how it goes.
- `manager`: `CheckpointManager`: what a run asks of its checkpoints; holds the lock.
- `policy`: `Every`: when the next checkpoint is due.
- `testing`: `LogFs` (a disk that can lose power) and `FaultFs` (a disk whose k-th call fails).
"""
