"""Working memories that fail and snapshots that are damaged on demand."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.errors import ConsistencyError, MemoryLost, MemoryUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.memory import Answer, Command, Held, Item, Owner, Packed

from .mesh import Mesh


class FaultyMemory(InProcessWorkingMemory):
    """An L1 that can be unavailable, lose keys or lose everything, on demand."""

    def __init__(self, mesh: Mesh, *, survives: bool) -> None:
        super().__init__(mesh.clock)
        self._survives, self._replacing = survives, False
        self.away: set[str] = set()
        self.in_doubt = 0  # number of writes to apply and then report as failed
        self.evicted: dict[str, set[str]] = defaultdict(set)
        self.done: Counter[str] = Counter()
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}

    @property
    def survives(self) -> bool:
        return self._survives

    def empty(self) -> None:
        self._memories.clear()

    def evict(self, key: str) -> None:
        """Lose `key` in every memory and record it as evicted."""
        for agent_id, memory in self._memories.items():
            memory.keys.execute(Command("DEL", key), self._now_ms())
            self.evicted[agent_id].add(key)

    def change(self, key: str, value: bytes) -> None:
        """Change `key` in every memory without any run noticing."""
        for memory in self._memories.values():
            memory.keys.execute(Command("SET", key, (value,)), self._now_ms())

    def values(self, task_id: str) -> dict[str, Any]:
        """The contents of the memory of a task, by key."""
        (found,) = [id_ for id_ in self._memories if id_.endswith(task_id)] or [""]
        return {item.key: item.content for item in self._memories[found].keys.items(self._now_ms())} if found else {}

    async def _had(self, name: str) -> None:
        self.done[name] += 1
        if name in self.after:
            await self.after[name]()

    def _there(self, name: str) -> None:
        if name in self.away or "all" in self.away:
            raise MemoryUnavailable(f"{name}: L1 is unavailable")

    async def execute(self, owner: Owner, commands: Sequence[Command], *, seen: int = 0) -> tuple[int, list[Answer]]:
        self._there("execute")
        if lost := self.evicted[owner.agent_id] & {command.key for command in commands}:
            raise MemoryLost(f"{lost} were evicted")
        answer = await super().execute(owner, commands, seen=seen)
        await self._had("execute")
        if self.in_doubt and any(command.writes for command in commands):
            self.in_doubt -= 1
            raise MemoryUnavailable("the answer was lost")
        return answer

    async def read(self, agent_id: str) -> Held:
        if not self._replacing:
            self._there("read")
        held = await super().read(agent_id)
        await self._had("read")
        return replace(held, lost=tuple(sorted(self.evicted[agent_id])))

    async def replace(
        self, owner: Owner, items: Sequence[Item], *, seen: int | None = None, force: bool = False
    ) -> Held:
        self._there("replace")
        self.evicted[owner.agent_id].clear()
        self._replacing = True
        try:
            return await super().replace(owner, items, seen=seen, force=force)
        finally:
            self._replacing = False

    async def adopt(self, owner: Owner, version: int) -> bool:
        self._there("adopt")
        return await super().adopt(owner, version)

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        self._there("retain")
        self.done["retain"] += 1

    async def forget(self, owner: Owner) -> None:
        self._there("forget")
        await super().forget(owner)


class Snapshots:
    """Snapshot store in the role of Redis."""

    def __init__(self) -> None:
        self.kept: dict[str, Packed] = {}
        self.puts: list[int] = []
        self.away = False
        self.hopeless = False

    async def put(self, agent_id: str, packed: Packed) -> bool:
        self._there()
        if agent_id in self.kept and self.kept[agent_id].order > packed.order:
            return False
        self.kept[agent_id] = packed
        self.puts.append(packed.order)
        return True

    async def get(self, agent_id: str) -> Packed | None:
        self._there()
        if self.hopeless:
            raise ConsistencyError("the snapshot in Redis is not a snapshot", changed=["hopeless"])
        return self.kept.get(agent_id)

    async def digest(self, agent_id: str) -> str | None:
        self._there()
        return self.kept[agent_id].digest if agent_id in self.kept else None

    async def forget(self, agent_id: str) -> None:
        self._there()
        self.kept.pop(agent_id, None)

    async def close(self) -> None:
        pass

    def _there(self) -> None:
        if self.away:
            raise MemoryUnavailable("the second place is unavailable")


class Places:
    """Memory tiers of a mesh: an L1 per replica ("local") or a shared one ("surviving")."""

    def __init__(self, mesh: Mesh, kind: str) -> None:
        self.mesh, self.kind = mesh, kind
        self.survives = kind == "surviving"
        self.l1 = FaultyMemory(mesh, survives=self.survives)
        self.snapshots = Snapshots()

    def __call__(self) -> dict[str, Any]:
        """Options for the next replica. A local L1 is new for each replica; `l1` is the latest."""
        if not self.survives:
            self.l1 = FaultyMemory(self.mesh, survives=False)
            return {"l1": self.l1}
        return {"l1": self.l1, "snapshots": self.snapshots}

    async def in_sql(self, task_id: str) -> bytes | None:
        """The packed memory of a task as stored in the database, or `None`."""
        found = await self.mesh.store.l1_snapshot(TaskId(task_id))
        return None if found is None else found.content
