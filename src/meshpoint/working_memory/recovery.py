"""Recover the working memory of a resumed task from the best available copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeAlias

from meshpoint.errors import ConsistencyError, MemoryFenced, MemoryUnavailable
from meshpoint.model.memory import (
    MemoryContents,
    MemoryRecovery,
    MemorySource,
    Owner,
    PackedSnapshot,
)
from meshpoint.model.tasks import L1Snapshot
from meshpoint.own_threads import run_in_own_thread
from meshpoint.ports.working_memory import ReportProblem, SnapshotStore, WorkingMemory
from meshpoint.working_memory.digests import ConsistencyVerifier, fingerprint
from meshpoint.working_memory.packing import VerifiedSnapshot, from_bytes, unpack

UNREADABLE_PREFIX = "absent:"
"""Precedes the version of L1, in place of a digest, if the memory could not be read."""

UNRECOVERABLE = f"{UNREADABLE_PREFIX}0"
"""In place of a digest: the task had a memory, but no copy exists."""

FetchSnapshot: TypeAlias = Callable[[], Awaitable[L1Snapshot | None]]
"""Fetches the newest snapshot of the task from the database."""

_MIN_THREAD_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class RecoveredMemory:
    """A recovered memory, with its digest and how it was recovered. The run owns it.

    `order` is the order of the snapshot, if it came from one.
    """

    recovery: MemoryRecovery
    version: int
    digest: str
    order: int = 0


@dataclass(frozen=True, slots=True)
class _Candidate:
    source: MemorySource
    packed: PackedSnapshot
    snapshot: VerifiedSnapshot


@dataclass(slots=True)
class _Search:
    """What one recovery has found: damage, and intact snapshots of other checkpoints."""

    l1_version: int = 0
    problems: list[str] = field(default_factory=list)
    errors: list[ConsistencyError] = field(default_factory=list)
    stale_candidates: list[_Candidate] = field(default_factory=list)
    unavailable: bool = False  # the snapshot store did not answer: it may have the only copy

    def add_error(self, error: ConsistencyError) -> None:
        self.errors.append(error)
        self.problems.append(str(error))

    def to_error(self, agent_id: str) -> ConsistencyError:
        """Combine all damage into one error."""
        summary = f"memory {agent_id}: no copy matches the last checkpoint"
        return ConsistencyError(
            "; ".join([summary, *self.problems]),
            missing=_merge_keys(error.missing for error in self.errors),
            extra=_merge_keys(error.extra for error in self.errors),
            changed=_merge_keys(error.changed for error in self.errors),
        )


def _merge_keys(keys: Iterable[Iterable[str]]) -> list[str]:
    return sorted(set(chain.from_iterable(keys)))


class L1CacheRestorer:
    """Restores memories into L1.

    A memory is written next to the live one and then swapped in: after a crash, L1 has either of
    them.
    """

    def __init__(self, l1: WorkingMemory) -> None:
        self._l1 = l1

    async def restore_from_snapshot(
        self, owner: Owner, snapshot: VerifiedSnapshot, label: str, *, seen: int | None = None
    ) -> MemoryContents:
        """Replace the memory with a snapshot, and return the verified new contents.

        Keys that have expired since are left out.

        Raises:
            MemoryUnavailable: L1 did not answer. It has either the old memory or the new one.
            MemoryFenced: Another run owns it.
            ConsistencyError: The written memory differs from the snapshot. The error has the
                affected keys.
        """
        contents = await self._l1.replace(owner, snapshot.items, expected_version=seen)
        expired = {
            item.key
            for item in snapshot.items
            if item.expires_at is not None and item.expires_at <= contents.now
        }
        expected = {key: digest for key, digest in snapshot.digests.items() if key not in expired}
        ConsistencyVerifier(expected).verify(contents.items, f"the memory restored from {label}")
        return contents


class DualRecoveryStrategy:
    """Finds the memory as of the last checkpoint: in L1, the snapshot store or the database.

    They are tried in this order, and the first copy with the expected digest is used; `served`
    counts them. If none has it, the newest intact snapshot is used and marked as `behind`. If
    nothing is found at all, the memory is empty. If everything found is damaged, it raises
    `ConsistencyError` with the affected keys rather than guess.
    """

    def __init__(
        self, l1: WorkingMemory, snapshots: SnapshotStore | None, report_problem: ReportProblem
    ) -> None:
        self._l1, self._snapshots, self._report_problem = l1, snapshots, report_problem
        self._restorer = L1CacheRestorer(l1)
        self.served: Counter[MemorySource] = Counter()

    async def recover(
        self,
        owner: Owner,
        expected: str | None,
        fetch_sql: FetchSnapshot,
        *,
        last_seq: int | None = None,
    ) -> RecoveredMemory:
        """Make `owner` the owner of the memory with fingerprint `expected`.

        Args:
            owner: The run that will own the memory.
            expected: Fingerprint in the last checkpoint; `None` if the task has no memory yet.
            fetch_sql: Fetches the snapshot in the database.
            last_seq: Number of the last checkpoint. Snapshots with a higher order are ignored:
                they belong to checkpoints that the database has lost.

        Raises:
            MemoryUnavailable: L1 did not answer or keeps changing; or the snapshot store did not
                answer, and no other copy matches the checkpoint.
            MemoryFenced: Another run owns the memory.
            ConsistencyError: All copies are damaged. The error has the affected keys.
            Unavailable: The database was needed and did not answer.
        """
        recovered = await self._recover(owner, expected, fetch_sql, last_seq)
        self.served[recovered.recovery.source] += 1
        return recovered

    async def recover_as_owner(
        self,
        owner: Owner,
        expected: str | None,
        fetch_sql: FetchSnapshot,
        *,
        last_seq: int | None,
        is_owner: Callable[[], Awaitable[bool]],
    ) -> RecoveredMemory:
        """Like `recover`, even if L1 knows a later run, provided that `is_owner` confirms.

        That run was lost with the database's recent past, or belongs to another task with this id.
        """
        try:
            return await self.recover(owner, expected, fetch_sql, last_seq=last_seq)
        except MemoryFenced:
            if not await is_owner():
                raise
        contents = await self._l1.read(owner.agent_id)
        await self._l1.replace(owner, contents.items, force=True)
        return await self.recover(owner, expected, fetch_sql, last_seq=last_seq)

    async def _recover(
        self, owner: Owner, expected: str | None, fetch_sql: FetchSnapshot, last_seq: int | None
    ) -> RecoveredMemory:
        if expected is None:
            return self._to_recovered(
                await self._start_empty(owner), MemoryRecovery(MemorySource.NONE)
            )
        search = _Search()
        if (adopted := await self._adopt_l1(owner, expected, search)) is not None:
            live, digest = adopted
            verified = not expected.startswith(UNREADABLE_PREFIX)
            recovery = MemoryRecovery(
                MemorySource.L1, len(live.items), verified, problems=tuple(search.problems)
            )
            return RecoveredMemory(recovery, live.version, digest)
        sources = (
            partial(self._read_snapshot_store, owner.agent_id, search),
            partial(self._read_sql, fetch_sql, search),
        )
        for read_source in sources:
            candidate = await read_source()
            if candidate is not None and candidate.packed.digest == expected:
                if (recovered := await self._restore(owner, candidate, search)) is not None:
                    return recovered
            elif candidate is not None and (
                last_seq is None or candidate.packed.order <= last_seq
            ):
                search.stale_candidates.append(candidate)
        return await self._restore_stale(owner, search)

    async def _start_empty(self, owner: Owner) -> MemoryContents:
        try:
            return await self._l1.replace(owner, (), expected_version=0)
        except MemoryUnavailable:  # an earlier try may have succeeded without an answer
            contents = await self._l1.read(owner.agent_id)
            if contents.run_id != owner.run_id:
                raise
            return await self._l1.replace(owner, (), expected_version=contents.version)

    async def _adopt_l1(
        self, owner: Owner, expected: str, search: _Search
    ) -> tuple[MemoryContents, str] | None:
        """Return what L1 contains and its fingerprint, if it matches the checkpoint."""
        for _ in range(3):
            contents = await self._l1.read(owner.agent_id)
            search.l1_version = contents.version
            if contents.run_id is None or not self._l1.durable:
                return None
            if contents.lost_keys:
                search.problems.append(
                    str(ConsistencyError("L1 is not complete", missing=contents.lost_keys))
                )
                return None
            if contents.oversized_keys:
                search.problems.append(
                    str(
                        ConsistencyError(
                            "L1 is too large to read", changed=contents.oversized_keys
                        )
                    )
                )
                return None
            digest = await _compute_fingerprint(contents)
            if expected not in {f"{UNREADABLE_PREFIX}{contents.version}", digest}:
                search.problems.append("L1 has changed since the checkpoint, or keys have expired")
                return None
            if await self._l1.adopt(owner, contents.version):
                return contents, digest
        raise MemoryUnavailable(f"memory {owner.agent_id}: it keeps changing while it is read")

    async def _read_snapshot_store(self, agent_id: str, search: _Search) -> _Candidate | None:
        if self._snapshots is None:
            return None
        try:
            packed = await self._snapshots.get(agent_id)
            return (
                None
                if packed is None
                else await _unpack_candidate(
                    MemorySource.SNAPSHOT, packed, "the snapshot in Redis"
                )
            )
        except ConsistencyError as error:
            search.add_error(error)
        except MemoryUnavailable as error:
            search.problems.append(str(error))
            search.unavailable = True
        return None

    async def _read_sql(self, fetch: FetchSnapshot, search: _Search) -> _Candidate | None:
        row = await fetch()
        label = "the snapshot in the database"
        try:
            if row is None:
                return None
            packed = from_bytes(row.content, label)
            if packed.digest != row.digest:
                raise ConsistencyError(f"{label}: its digest differs from the digest in its row")
            return await _unpack_candidate(MemorySource.SQL, packed, label)
        except ConsistencyError as error:
            search.add_error(error)
        return None

    async def _restore(
        self, owner: Owner, candidate: _Candidate, search: _Search, *, stale: bool = False
    ) -> RecoveredMemory | None:
        try:
            contents = await self._restorer.restore_from_snapshot(
                owner, candidate.snapshot, f"the {candidate.source} copy", seen=search.l1_version
            )
        except ConsistencyError as error:
            search.add_error(error)
            search.l1_version = (await self._l1.read(owner.agent_id)).version
            return None
        recovery = MemoryRecovery(
            candidate.source,
            len(contents.items),
            verified=not stale,
            behind=stale,
            problems=tuple(search.problems),
        )
        if len(contents.items) == len(candidate.snapshot.items):
            return RecoveredMemory(
                recovery, contents.version, candidate.packed.digest, candidate.packed.order
            )
        return self._to_recovered(contents, recovery, candidate.packed.order)

    async def _restore_stale(self, owner: Owner, search: _Search) -> RecoveredMemory:
        """Restore the newest intact snapshot, since no copy matches the checkpoint."""
        if search.unavailable:
            raise MemoryUnavailable(f"memory {owner.agent_id}: {'; '.join(search.problems)}")
        for candidate in sorted(search.stale_candidates, key=lambda each: -each.packed.order):
            if (
                recovered := await self._restore(owner, candidate, search, stale=True)
            ) is not None:
                self._report_problem(
                    owner.agent_id,
                    "behind",
                    f"from {candidate.source}; {'; '.join(search.problems)}",
                )
                return recovered
        if search.errors:
            raise search.to_error(owner.agent_id)
        contents = await self._l1.replace(owner, (), expected_version=search.l1_version)
        self._report_problem(owner.agent_id, "nothing_found", "; ".join(search.problems))
        recovery = MemoryRecovery(
            MemorySource.NONE, verified=False, behind=True, problems=tuple(search.problems)
        )
        return self._to_recovered(contents, recovery)

    @staticmethod
    def _to_recovered(
        contents: MemoryContents, recovery: MemoryRecovery, order: int = 0
    ) -> RecoveredMemory:
        return RecoveredMemory(recovery, contents.version, fingerprint(contents.items), order)


async def _compute_fingerprint(contents: MemoryContents) -> str:
    if len(contents.items) < 1000:
        return fingerprint(contents.items)
    return await run_in_own_thread(fingerprint, contents.items)


async def _unpack_candidate(
    source: MemorySource, packed: PackedSnapshot, label: str
) -> _Candidate:
    if sum(map(len, packed.chunks)) < _MIN_THREAD_BYTES:
        return _Candidate(source, packed, unpack(packed, label))
    return _Candidate(source, packed, await run_in_own_thread(unpack, packed, label))
