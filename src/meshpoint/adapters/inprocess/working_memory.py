"""Working memory in this process, used where no Redis is configured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count

from meshpoint.adapters.inprocess.keyspace import Keyspace
from meshpoint.errors import MemoryFenced, MemoryLost, MemoryUnavailable
from meshpoint.model.ids import RunId
from meshpoint.model.memory import Answer, Command, Held, Item, Owner
from meshpoint.ports.clock import Clock

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(slots=True)
class _Memory:
    run_id: RunId
    fence: int
    version: int
    keys: Keyspace


class InProcessWorkingMemory:
    """A `meshpoint.ports.working_memory.WorkingMemory` that is lost with the process.

    No method awaits anything, so each is atomic on the event loop. A memory never expires: its
    owner must call `forget` when the task may continue in another process.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._memories: dict[str, _Memory] = {}
        self._versions = count(1)  # shared, so that a recreated memory never reuses a version

    @property
    def survives(self) -> bool:
        """`False`: memories are lost with the process."""
        return False

    async def open(self) -> None:
        """Do nothing: there is no connection to check."""

    async def execute(self, owner: Owner, commands: Sequence[Command], *, seen: int = 0) -> tuple[int, list[Answer]]:
        """Execute commands in order. Returns the memory's version and the answers.

        Raises:
            MemoryFenced: another run owns the memory, with the same or a higher fence.
            MemoryLost: the memory is missing, has an earlier owner, or is older than version
                `seen`.
            MemoryRefused: a command does not fit its key's value. Earlier commands were executed.
            MemoryUnavailable: commands write, and the memory is newer than version `seen`.
        """
        memory, now = self._require_owned(owner, seen), self._now_ms()
        if any(command.writes for command in commands):
            _require_unchanged(owner, memory, seen or memory.version)
            memory.version = next(self._versions)
        return memory.version, [memory.keys.execute(command, now) for command in commands]

    async def keys(self, owner: Owner, *, seen: int = 0) -> list[str]:
        """The keys that exist, in no particular order. Raises like `execute`."""
        return self._require_owned(owner, seen).keys.keys(self._now_ms())

    async def read(self, agent_id: str) -> Held:
        """A copy of the whole memory."""
        memory, now = self._memories.get(agent_id), self._now_ms()
        if memory is None:
            return Held((), 0, now)
        return Held(memory.keys.items(now), memory.version, now, memory.run_id, memory.fence)

    async def adopt(self, owner: Owner, version: int) -> bool:
        """Become the owner of the memory if it still has this version. Returns whether it has.

        Raises:
            MemoryFenced: its owner has a higher fence.
        """
        memory = self._unless_fenced(owner)
        if memory is None or memory.version != version:
            return False
        memory.run_id, memory.fence = owner.run_id, owner.fence
        return True

    async def replace(
        self, owner: Owner, items: Sequence[Item], *, seen: int | None = None, force: bool = False
    ) -> Held:
        """Replace the whole memory with `items` and become its owner.

        Raises:
            MemoryFenced: its owner has a higher fence, and `force` is not set.
            MemoryUnavailable: this run owns the memory, but its version is not `seen`.
        """
        existing = self._memories.get(owner.agent_id) if force else self._unless_fenced(owner)
        if existing is not None and existing.run_id == owner.run_id and seen is not None:
            _require_unchanged(owner, existing, seen)
        version = next(self._versions)
        self._memories[owner.agent_id] = _Memory(owner.run_id, owner.fence, version, Keyspace(items))
        return await self.read(owner.agent_id)

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        """Do nothing: memories never expire."""

    async def forget(self, owner: Owner) -> None:
        """Delete the memory, unless another run with the same or a higher fence owns it."""
        memory = self._memories.get(owner.agent_id)
        if memory is not None and (memory.run_id == owner.run_id or memory.fence < owner.fence):
            del self._memories[owner.agent_id]

    async def close(self) -> None:
        """Do nothing: memories are released with this object."""

    def _require_owned(self, owner: Owner, seen: int) -> _Memory:
        memory = self._memories.get(owner.agent_id)
        if memory is None or (memory.run_id != owner.run_id and memory.fence < owner.fence):
            raise MemoryLost(f"working memory {owner.agent_id}: its contents are missing")
        if memory.run_id != owner.run_id or memory.fence > owner.fence:
            raise _fenced_error(owner, memory)
        if memory.version < seen:
            raise MemoryLost(f"working memory {owner.agent_id}: it is older than last seen")
        return memory

    def _unless_fenced(self, owner: Owner) -> _Memory | None:
        memory = self._memories.get(owner.agent_id)
        if memory is not None and memory.fence > owner.fence:
            raise _fenced_error(owner, memory)
        return memory

    def _now_ms(self) -> int:
        return (self._clock.now() - _EPOCH) // _MILLISECOND


def _require_unchanged(owner: Owner, memory: _Memory, seen: int) -> None:
    if memory.version != seen:
        raise MemoryUnavailable(f"working memory {owner.agent_id}: it has changed since it was last read")


def _fenced_error(owner: Owner, memory: _Memory) -> MemoryFenced:
    return MemoryFenced(
        f"working memory {owner.agent_id}: owned by run {memory.run_id} with fence {memory.fence}, "
        f"not by run {owner.run_id} with fence {owner.fence}"
    )
