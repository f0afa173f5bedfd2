"""Write snapshots into L1 and verify them at once."""

from __future__ import annotations

from meshpoint.model.memory import Held, Owner
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.working_memory.packing import VerifiedSnapshot
from meshpoint.working_memory.verifier import ConsistencyVerifier


class L1CacheRestorer:
    """Restores memories into L1.

    A memory is written next to the live one and then swapped in: after a crash, L1 has either of
    them.
    """

    def __init__(self, l1: WorkingMemory) -> None:
        self._l1 = l1

    async def restore_from_snapshot(
        self, owner: Owner, snapshot: VerifiedSnapshot, label: str, *, seen: int | None = None
    ) -> Held:
        """Replace the memory with a snapshot, and return the verified new contents.

        Keys that have expired since are left out.

        Raises:
            MemoryUnavailable: L1 did not answer. It has either the old memory or the new one.
            MemoryFenced: Another run owns it.
            ConsistencyError: The written memory differs from the snapshot. The error has the
                affected keys.
        """
        contents = await self._l1.replace(owner, snapshot.items, seen=seen)
        expired = {
            item.key for item in snapshot.items if item.expires_at is not None and item.expires_at <= contents.now
        }
        expected = {key: digest for key, digest in snapshot.digests.items() if key not in expired}
        ConsistencyVerifier(expected).verify(contents.items, f"the memory restored from {label}")
        return contents
