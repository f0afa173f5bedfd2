"""Where a task that goes on has its working memory from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeAlias

from meshpoint.errors import ConsistencyError, MemoryUnavailable
from meshpoint.model.agent_memory import MemoryRecovery, MemorySource
from meshpoint.model.checkpoint import L1Snapshot
from meshpoint.model.memory import Held, Owner, Packed
from meshpoint.own_threads import in_own_thread
from meshpoint.ports.working_memory import SnapshotStore, Tell, WorkingMemory
from meshpoint.working_memory.digests import fingerprint
from meshpoint.working_memory.packing import Unpacked, from_bytes, unpack
from meshpoint.working_memory.restorer import L1CacheRestorer

ABSENT = "absent:"
"""Before the version that L1 had, in place of a digest: there was a memory, and nobody could read it then."""

NOWHERE = f"{ABSENT}0"
"""In place of a digest: there was a memory, and no place can have it."""

Fetch: TypeAlias = Callable[[], Awaitable[L1Snapshot | None]]
"""The newest snapshot of the task in the database."""

_THREAD_FROM = 256 * 1024


@dataclass(frozen=True, slots=True)
class Recovered:
    """A memory that its owner has, the digest of its content, and how it was come by.

    `order` is that of the snapshot, if it came from one.
    """

    how: MemoryRecovery
    version: int
    digest: str
    order: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    source: MemorySource
    packed: Packed
    snapshot: Unpacked


@dataclass(slots=True)
class _Search:
    """What one recovery has seen: damage, and what is whole but not what is looked for."""

    seen: int = 0  # the version of L1
    problems: list[str] = field(default_factory=list)
    damaged: list[ConsistencyError] = field(default_factory=list)
    others: list[_Found] = field(default_factory=list)
    away: bool = False  # a place did not answer: it may have what nobody else has

    def note(self, error: ConsistencyError) -> None:
        self.damaged.append(error)
        self.problems.append(str(error))

    def refusal(self, agent_id: str) -> ConsistencyError:
        """All damage as one error."""
        what = f"memory {agent_id}: no place has it as the last checkpoint had it"
        return ConsistencyError(
            "; ".join([what, *self.problems]),
            missing=_all(error.missing for error in self.damaged),
            extra=_all(error.extra for error in self.damaged),
            changed=_all(error.changed for error in self.damaged),
        )


def _all(keys: Iterable[Iterable[str]]) -> list[str]:
    return sorted(set(chain.from_iterable(keys)))


class DualRecoveryStrategy:
    """Finds the memory that the last checkpoint had: in L1 if it is complete there, else in the second place, else in
    the database. The first that has its digest serves; `served` counts.

    Where none has, the newest that is whole serves as it is, `behind`. Nothing found at all is an empty memory. Only
    where all that was found is damaged, nobody may guess: `ConsistencyError` names the keys.
    """

    def __init__(self, l1: WorkingMemory, snapshots: SnapshotStore | None, tell: Tell) -> None:
        self._l1, self._snapshots, self._tell = l1, snapshots, tell
        self._restorer = L1CacheRestorer(l1)
        self.served: Counter[MemorySource] = Counter()

    async def recover(
        self, owner: Owner, expected: str | None, from_sql: Fetch, *, newest: int | None = None
    ) -> Recovered:
        """Make `owner` the owner of the memory with the fingerprint `expected`; None: the task has none yet.

        `newest` is the number of the last checkpoint: a snapshot with a higher order is of a past that the database
        has lost.

        Raises:
            MemoryUnavailable: L1 did not answer, or somebody changes it all the time; or the second place did not
                answer, and no other has what the checkpoint had.
            MemoryFenced: another run owns the memory by now.
            ConsistencyError: what was found is damaged everywhere; names the keys.
            Unavailable: the database had to be asked and did not answer.
        """
        recovered = await self._recovered(owner, expected, from_sql, newest)
        self.served[recovered.how.source] += 1
        return recovered

    async def _recovered(self, owner: Owner, expected: str | None, from_sql: Fetch, newest: int | None) -> Recovered:
        if expected is None:
            return self._as_found(await self._emptied(owner), MemoryRecovery(MemorySource.NONE))
        search = _Search()
        if (adopted := await self._adopted(owner, expected, search)) is not None:
            live, digest = adopted
            verified = not expected.startswith(ABSENT)
            how = MemoryRecovery(MemorySource.L1, len(live.items), verified, problems=tuple(search.problems))
            return Recovered(how, live.version, digest)
        places = (partial(self._from_second_place, owner.agent_id, search), partial(self._from_sql, from_sql, search))
        for place in places:
            found = await place()
            if found is not None and found.packed.digest == expected:
                if (recovered := await self._restored(owner, found, search)) is not None:
                    return recovered
            elif found is not None and (newest is None or found.packed.order <= newest):
                search.others.append(found)
        return await self._behind(owner, search)

    async def _emptied(self, owner: Owner) -> Held:
        try:
            return await self._l1.replace(owner, (), seen=0)
        except MemoryUnavailable:  # maybe it is this run's already: an earlier try came through unheard
            held = await self._l1.read(owner.agent_id)
            if held.run_id != owner.run_id:
                raise
            return await self._l1.replace(owner, (), seen=held.version)

    async def _adopted(self, owner: Owner, expected: str, search: _Search) -> tuple[Held, str] | None:
        """What is in L1, and its fingerprint, if it is what the checkpoint had."""
        for _ in range(3):
            held = await self._l1.read(owner.agent_id)
            search.seen = held.version
            if held.run_id is None or not self._l1.survives:
                return None
            if held.lost:
                search.problems.append(str(ConsistencyError("L1 is not complete", missing=held.lost)))
                return None
            if held.large:
                search.problems.append(str(ConsistencyError("L1 is too large to read", changed=held.large)))
                return None
            digest = await _digest(held)
            if expected not in {f"{ABSENT}{held.version}", digest}:
                search.problems.append("L1 was written to since the checkpoint, or keys have ended")
                return None
            if await self._l1.adopt(owner, held.version):
                return held, digest
        raise MemoryUnavailable(f"memory {owner.agent_id}: it changes while it is looked at")

    async def _from_second_place(self, agent_id: str, search: _Search) -> _Found | None:
        if self._snapshots is None:
            return None
        try:
            packed = await self._snapshots.get(agent_id)
            return None if packed is None else await _unpacked(MemorySource.SNAPSHOT, packed, "the snapshot in Redis")
        except ConsistencyError as error:
            search.note(error)
        except MemoryUnavailable as error:
            search.problems.append(str(error))
            search.away = True
        return None

    async def _from_sql(self, fetch: Fetch, search: _Search) -> _Found | None:
        row = await fetch()
        what = "the snapshot in the database"
        try:
            if row is None:
                return None
            packed = from_bytes(row.content, what)
            if packed.digest != row.digest:
                raise ConsistencyError(f"{what}: its digest is not that of its row")
            return await _unpacked(MemorySource.SQL, packed, what)
        except ConsistencyError as error:
            search.note(error)
        return None

    async def _restored(
        self, owner: Owner, found: _Found, search: _Search, *, behind: bool = False
    ) -> Recovered | None:
        try:
            held = await self._restorer.restore(owner, found.snapshot, f"the {found.source} copy", seen=search.seen)
        except ConsistencyError as error:
            search.note(error)
            search.seen = (await self._l1.read(owner.agent_id)).version
            return None
        how = MemoryRecovery(
            found.source, len(held.items), verified=not behind, behind=behind, problems=tuple(search.problems)
        )
        if len(held.items) == len(found.snapshot.items):
            return Recovered(how, held.version, found.packed.digest, found.packed.order)
        return self._as_found(held, how, found.packed.order)

    async def _behind(self, owner: Owner, search: _Search) -> Recovered:
        """The best there is, where nothing is what the checkpoint had."""
        if search.away:
            raise MemoryUnavailable(f"memory {owner.agent_id}: {'; '.join(search.problems)}")
        for found in sorted(search.others, key=lambda each: -each.packed.order):
            if (recovered := await self._restored(owner, found, search, behind=True)) is not None:
                self._tell(owner.agent_id, "behind", f"from {found.source}; {'; '.join(search.problems)}")
                return recovered
        if search.damaged:
            raise search.refusal(owner.agent_id)
        held = await self._l1.replace(owner, (), seen=search.seen)
        self._tell(owner.agent_id, "nothing_found", "; ".join(search.problems))
        how = MemoryRecovery(MemorySource.NONE, verified=False, behind=True, problems=tuple(search.problems))
        return self._as_found(held, how)

    @staticmethod
    def _as_found(held: Held, how: MemoryRecovery, order: int = 0) -> Recovered:
        return Recovered(how, held.version, fingerprint(held.items), order)


async def _digest(held: Held) -> str:
    if len(held.items) < 1000:
        return fingerprint(held.items)
    return await in_own_thread(fingerprint, held.items)


async def _unpacked(source: MemorySource, packed: Packed, what: str) -> _Found:
    if sum(map(len, packed.chunks)) < _THREAD_FROM:
        return _Found(source, packed, unpack(packed, what))
    return _Found(source, packed, await in_own_thread(unpack, packed, what))
