"""Working memory that survives: snapshots with every checkpoint, and whatever is best to go on from.

A segment meets it in `task_memory`; `recovery` decides where it comes from, `snapshotter` and `restorer` carry it out
and in, `digests` and `verifier` tell whether it is what it was.
"""
