"""Working memories that fail and snapshots that are damaged on demand."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.errors import ConsistencyError, MemoryLost, MemoryUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.memory import Answer, Command, Item, MemoryContents, Owner, PackedSnapshot

from .mesh import Mesh


class FaultyMemory(InProcessWorkingMemory):
    """An L1 that can be unavailable, lose keys or lose everything, on demand."""

    def __init__(self, mesh: Mesh, *, durable: bool) -> None:
        super().__init__(mesh.clock)
        self._durable, self._replacing = durable, False
        self.unavailable_methods: set[str] = set()
        self.writes_in_doubt = 0  # number of writes to apply and then report as failed
        self.evicted_keys: dict[str, set[str]] = defaultdict(set)
        self.call_counts: Counter[str] = Counter()
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}

    @property
    def durable(self) -> bool:
        return self._durable

    def empty(self) -> None:
        self._memories.clear()

    def evict(self, key: str) -> None:
        """Lose `key` in every memory and record it as evicted."""
        for agent_id, memory in self._memories.items():
            memory.keys.execute(Command("DEL", key), self._now_ms())
            self.evicted_keys[agent_id].add(key)

    def corrupt(self, key: str, value: bytes) -> None:
        """Change `key` in every memory without any run noticing."""
        for memory in self._memories.values():
            memory.keys.execute(Command("SET", key, (value,)), self._now_ms())

    def contents(self, task_id: str) -> dict[str, Any]:
        """The contents of the memory of a task, by key."""
        (agent_id,) = [
            candidate for candidate in self._memories if candidate.endswith(task_id)
        ] or [""]
        return (
            {
                item.key: item.content
                for item in self._memories[agent_id].keys.items(self._now_ms())
            }
            if agent_id
            else {}
        )

    async def _record_call(self, name: str) -> None:
        self.call_counts[name] += 1
        if name in self.after:
            await self.after[name]()

    def _check_available(self, name: str) -> None:
        if name in self.unavailable_methods or "all" in self.unavailable_methods:
            raise MemoryUnavailable(f"{name}: L1 is unavailable")

    async def execute(
        self, owner: Owner, commands: Sequence[Command], *, expected_version: int = 0
    ) -> tuple[int, list[Answer]]:
        self._check_available("execute")
        if lost := self.evicted_keys[owner.agent_id] & {command.key for command in commands}:
            raise MemoryLost(f"{lost} were evicted")
        answer = await super().execute(owner, commands, expected_version=expected_version)
        await self._record_call("execute")
        if self.writes_in_doubt and any(command.is_write for command in commands):
            self.writes_in_doubt -= 1
            raise MemoryUnavailable("the answer was lost")
        return answer

    async def read(self, agent_id: str) -> MemoryContents:
        if not self._replacing:
            self._check_available("read")
        contents = await super().read(agent_id)
        await self._record_call("read")
        return replace(contents, lost_keys=tuple(sorted(self.evicted_keys[agent_id])))

    async def replace(
        self,
        owner: Owner,
        items: Sequence[Item],
        *,
        expected_version: int | None = None,
        force: bool = False,
    ) -> MemoryContents:
        self._check_available("replace")
        self.evicted_keys[owner.agent_id].clear()
        self._replacing = True
        try:
            return await super().replace(
                owner, items, expected_version=expected_version, force=force
            )
        finally:
            self._replacing = False

    async def adopt(self, owner: Owner, version: int) -> bool:
        self._check_available("adopt")
        return await super().adopt(owner, version)

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        self._check_available("retain")
        self.call_counts["retain"] += 1

    async def forget(self, owner: Owner) -> None:
        self._check_available("forget")
        await super().forget(owner)


class FakeSnapshots:
    """Snapshot store in the role of Redis."""

    def __init__(self) -> None:
        self.stored: dict[str, PackedSnapshot] = {}
        self.put_orders: list[int] = []
        self.unavailable = False
        self.corrupt = False

    async def put(self, agent_id: str, packed: PackedSnapshot) -> bool:
        self._check_available()
        if agent_id in self.stored and self.stored[agent_id].order > packed.order:
            return False
        self.stored[agent_id] = packed
        self.put_orders.append(packed.order)
        return True

    async def get(self, agent_id: str) -> PackedSnapshot | None:
        self._check_available()
        if self.corrupt:
            raise ConsistencyError("the snapshot in Redis is not a snapshot", changed=["hopeless"])
        return self.stored.get(agent_id)

    async def digest(self, agent_id: str) -> str | None:
        self._check_available()
        return self.stored[agent_id].digest if agent_id in self.stored else None

    async def forget(self, agent_id: str) -> None:
        self._check_available()
        self.stored.pop(agent_id, None)

    async def close(self) -> None:
        pass

    def _check_available(self) -> None:
        if self.unavailable:
            raise MemoryUnavailable("the second place is unavailable")


class MemoryTiers:
    """Memory tiers of a mesh: an L1 per replica ("local") or a shared one ("surviving")."""

    def __init__(self, mesh: Mesh, kind: str) -> None:
        self.mesh, self.kind = mesh, kind
        self.durable = kind == "surviving"
        self.l1 = FaultyMemory(mesh, durable=self.durable)
        self.snapshots = FakeSnapshots()

    def __call__(self) -> dict[str, Any]:
        """Options for the next replica. A local L1 is new for each replica; `l1` is the latest."""
        if not self.durable:
            self.l1 = FaultyMemory(self.mesh, durable=False)
            return {"l1": self.l1}
        return {"l1": self.l1, "snapshots": self.snapshots}

    async def sql_snapshot(self, task_id: str) -> bytes | None:
        """The packed memory of a task as stored in the database, or `None`."""
        snapshot = await self.mesh.store.l1_snapshot(TaskId(task_id))
        return None if snapshot is None else snapshot.content
