"""What a checkpoint has of the working memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshpoint.model.memory import PackedSnapshot
from meshpoint.model.subtasks import AgentCheckpoint, MemoryWrite
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import UNREADABLE_PREFIX
from meshpoint.working_memory.snapshots import Snapshot
from meshpoint.working_memory.write_log import encode_writes


@dataclass(frozen=True, slots=True)
class MemoryRef:
    """The memory in a checkpoint: its digest (`None`: no memory) and its snapshot.

    `sql_digest` is the digest of the snapshot in the database. `packed` is set if the memory
    differs from the last checkpoint, `content` if this checkpoint writes it to the database.
    `version` is the version of L1 at the snapshot, `None` without a snapshot. `writes` are the
    writes that are not in the task's log, or all writes if they replace those in the log.
    """

    digest: str | None = None
    sql_digest: str | None = None
    order: int | None = None
    version: int | None = None
    packed: PackedSnapshot | None = None
    content: bytes | None = None
    writes: tuple[MemoryWrite, ...] = ()
    writes_replace_log: bool = False
    finished_in_log: frozenset[str] = frozenset()

    @classmethod
    def from_checkpoint(cls, checkpoint: AgentCheckpoint | None) -> MemoryRef:
        """Create the reference from the task's last checkpoint."""
        if checkpoint is None:
            return cls()
        last = checkpoint.l1_snapshot_hash, checkpoint.l1_in_sql, checkpoint.seq
        return cls(
            *last,
            writes=checkpoint.memory_writes,
            writes_replace_log=checkpoint.memory_writes_replace_log,
        )

    def split_log(self) -> tuple[MemoryRef, bytes | None]:
        """The memory without its writes, and what a pause adds to the task's log instead."""
        if not (self.writes or self.finished_in_log or self.writes_replace_log):
            return self, None
        encoded = encode_writes(self.writes, self.finished_in_log)
        kept = replace(self, writes=(), writes_replace_log=False, finished_in_log=frozenset())
        return kept, encoded

    def apply_to(self, checkpoint: AgentCheckpoint) -> AgentCheckpoint:
        """Return `checkpoint` with this memory."""
        return checkpoint.model_copy(
            update={
                "l1_snapshot_hash": self.digest,
                "l1_snapshot": self.content,
                "l1_in_sql": self.sql_digest,
                "memory_writes": self.writes,
                "memory_writes_replace_log": self.writes_replace_log,
            }
        )

    def with_snapshot(self, snapshot: Snapshot, *, to_sql: bool, to_store: bool) -> MemoryRef:
        """Return the next checkpoint's memory, which is `snapshot`.

        Args:
            snapshot: The memory for the checkpoint.
            to_sql: Write it to the database if it is not already there.
            to_store: Write it to the snapshot store even if it equals the last checkpoint's.
        """
        packed = snapshot.packed
        to_sql = to_sql and packed.digest != self.sql_digest
        return replace(
            self,
            digest=packed.digest,
            sql_digest=packed.digest if to_sql else self.sql_digest,
            order=packed.order,
            version=snapshot.version,
            packed=packed if to_store or packed.digest != self.digest else None,
            content=to_bytes(packed) if to_sql else None,
        )

    def unreadable(self, order: int, version: int) -> MemoryRef:
        """Return the next checkpoint's memory if L1 cannot be read.

        It is then recognized by the `version` of L1; 0 matches none.
        """
        digest = f"{UNREADABLE_PREFIX}{version}"
        return replace(self, digest=digest, order=order, version=None, packed=None, content=None)
