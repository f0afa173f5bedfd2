"""Working memory that survives crashes: a snapshot with every checkpoint, and verified recovery.

Segments use it through `task_memory`. `recovery` decides which copy to restore, `snapshots` and
`restorer` read and write it, `digests` and `verifier` check that it is complete and unchanged.
"""
