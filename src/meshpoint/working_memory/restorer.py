"""Into L1: a snapshot in place of what is there, and held against its digests at once."""

from __future__ import annotations

from meshpoint.model.memory import Held, Owner
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.working_memory.packing import VerifiedSnapshot
from meshpoint.working_memory.verifier import ConsistencyVerifier


class L1CacheRestorer:
    """Restores memories beside the live ones and swaps them in, so that a crash leaves the one or the other."""

    def __init__(self, l1: WorkingMemory) -> None:
        self._l1 = l1

    async def restore_from_snapshot(
        self, owner: Owner, snapshot: VerifiedSnapshot, label: str, *, seen: int | None = None
    ) -> Held:
        """Put a snapshot in place of all that is there; what is there then, which is exactly it.

        Keys whose own time has passed since are left out.

        Raises:
            MemoryUnavailable: L1 did not answer; it has the old memory or the new one.
            MemoryFenced: another run owns it by now.
            ConsistencyError: what arrived is not what was sent; names the keys.
        """
        contents = await self._l1.replace(owner, snapshot.items, seen=seen)
        expired = {
            item.key for item in snapshot.items if item.expires_at is not None and item.expires_at <= contents.now
        }
        expected = {key: digest for key, digest in snapshot.digests.items() if key not in expired}
        ConsistencyVerifier(expected).verify(contents.items, f"the memory restored from {label}")
        return contents
