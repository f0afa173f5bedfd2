"""Into L1: a snapshot in place of what is there, and held against its digests at once."""

from __future__ import annotations

from meshpoint.model.memory import Held, Owner
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.working_memory.packing import Unpacked
from meshpoint.working_memory.verifier import ConsistencyVerifier


class L1CacheRestorer:
    """Restores memories beside the live ones and swaps them in, so that a crash leaves the one or the other."""

    def __init__(self, l1: WorkingMemory) -> None:
        self._l1 = l1

    async def restore(self, owner: Owner, snapshot: Unpacked, what: str, *, seen: int | None = None) -> Held:
        """Put a snapshot in place of all that is there; what is there then, which is exactly it.

        Keys whose own time has passed since are left out.

        Raises:
            MemoryUnavailable: L1 did not answer; it has the old memory or the new one.
            MemoryFenced: another run owns it by now.
            ConsistencyError: what arrived is not what was sent; names the keys.
        """
        held = await self._l1.replace(owner, snapshot.items, seen=seen)
        over = {item.key for item in snapshot.items if item.expires_at is not None and item.expires_at <= held.now}
        left = {key: digest for key, digest in snapshot.digests.items() if key not in over}
        ConsistencyVerifier(left).verify(held.items, f"the memory restored from {what}")
        return held
