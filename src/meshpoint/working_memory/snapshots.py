"""Out of L1: a snapshot with each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from meshpoint.errors import ConsistencyError, MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.memory import Held, Item, Owner, Packed
from meshpoint.own_threads import in_own_thread
from meshpoint.ports.working_memory import SnapshotStore, Tell, WorkingMemory
from meshpoint.working_memory.packing import pack, size_of

_THREAD_FROM = 256 * 1024
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A memory at one instant. `version` is that of L1 then."""

    packed: Packed
    version: int


class L1CacheSnapshotter:
    """Takes what L1 holds, and keeps it in the second place.

    A memory of more than `max_bytes` is refused: every checkpoint would carry it.
    """

    def __init__(self, l1: WorkingMemory, snapshots: SnapshotStore | None, max_bytes: int, tell: Tell) -> None:
        self._l1, self._snapshots, self._max_bytes, self._tell = l1, snapshots, max_bytes, tell

    async def take(self, owner: Owner, order: int, *, seen: int = 0) -> Snapshot:
        """The memory of `owner` as it is at one instant. It has met the version `seen` of it.

        Raises:
            MemoryUnavailable: L1 did not answer.
            MemoryLost: something that should be there is not.
            MemoryFenced: it is another run's by now.
            MemoryRefused: it is too large; names the largest keys.
        """
        held = await self._l1.read(owner.agent_id)
        if held.run_id is None or (held.run_id != owner.run_id and held.fence < owner.fence):
            raise MemoryLost(f"memory {owner.agent_id}: all of it is gone")
        if held.run_id == owner.run_id and held.version < seen:
            raise MemoryLost(f"memory {owner.agent_id}: it is older than it was")
        if held.run_id != owner.run_id:
            raise MemoryFenced(f"memory {owner.agent_id}: another run owns it")
        if held.lost:
            raise MemoryLost(f"memory {owner.agent_id}: {_some(held.lost)} were evicted")
        if held.large:
            raise MemoryRefused(
                f"the working memory is too large to read (memory_max_bytes is {self._max_bytes:,}); "
                f"oversized keys: {_some(held.large)}"
            )
        size = self._checked_size(held)
        packed = pack(held, order) if size < _THREAD_FROM else await in_own_thread(pack, held, order)
        return Snapshot(packed, held.version)

    def _checked_size(self, held: Held) -> int:
        size = sum(map(size_of, held.items))
        if size > self._max_bytes:
            largest = islice(sorted(held.items, key=size_of, reverse=True), _NAMED)
            named = ", ".join(f"{_shown(item)}: {size_of(item):,}" for item in largest)
            raise MemoryRefused(
                f"the working memory has {size:,} bytes, and memory_max_bytes is {self._max_bytes:,}; "
                f"its largest keys are {named}"
            )
        return size

    async def has(self, agent_id: str, digest: str) -> bool:
        """Whether the second place has this snapshot, as far as can be known now."""
        try:
            return self._snapshots is None or await self._snapshots.digest(agent_id) == digest
        except (MemoryUnavailable, ConsistencyError):
            return False

    async def keep(self, agent_id: str, packed: Packed) -> bool:
        """Put a snapshot, whose checkpoint is durable, into the second place; False: that is not possible now."""
        try:
            if self._snapshots is not None and not await self._snapshots.put(agent_id, packed):
                self._tell(agent_id, "not_kept", "a later one is there, of a past that the database does not know")
                return False
        except (MemoryUnavailable, ConsistencyError) as error:
            self._tell(agent_id, "not_kept", str(error))
            return False
        return True


def _some(keys: tuple[str, ...]) -> str:
    return ", ".join(map(repr, keys[:_NAMED])) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")


def _shown(item: Item) -> str:
    return repr(item.key if len(item.key) <= 60 else f"{item.key[:60]}…")
