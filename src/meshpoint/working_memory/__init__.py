"""Working memory that survives crashes: a snapshot with every checkpoint, and verified recovery.

Segments use it through `task_memory`, whose states are in `states`. `recovery` decides which copy
to restore and writes it into L1, `snapshots` reads L1 for each checkpoint, `packing` is the stored
form, and `digests` checks that a memory is complete and unchanged.
"""
