"""Remember briefly where the status updates of a peer call are forwarded to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import islice

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.errors import StoreUnavailable
from meshpoint.model.transitions import Progress, ProgressRecorded

_MAX_AGE = 1.0  # seconds
_MAX_AGE_IN_IDLE_TIMEOUTS = 0.1
"""The store also skips extensions of an idle deadline by less than a tenth."""
_MAX_CALLS = 10_000
"""Maximum calls that are remembered. The most recent ones are kept."""

_MAX_BATCH_SIZE = 256


class RecentProgress:
    """Records the progress of calls in a store, about once a second for each at most.

    So a peer that sends 20 updates a second costs one look-up a second.
    """

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime, self._now = runtime, runtime.clock.monotonic
        self._overdue: dict[Progress, None] = {}
        self._known: OrderedDict[tuple[bool, Progress], tuple[ProgressRecorded, float]] = (
            OrderedDict()
        )

    async def record(
        self, backend: Backend, updates: Sequence[Progress]
    ) -> list[ProgressRecorded | None]:
        """Extend idle deadlines, and return the requesters to forward the updates to.

        If the database is unavailable and new tasks do not need it, deadlines are extended later
        and nothing is forwarded.

        Raises:
            Unavailable, ConfigurationError: As `record_progress` of the store.
        """
        targets: dict[Progress, ProgressRecorded | None] = {}
        for progress in updates:
            target, until = self._known.get((backend.is_shared, progress), (None, None))
            if until is not None and self._now() < until:
                targets[progress] = target
        if unknown := [each for each in dict.fromkeys(updates) if each not in targets]:
            try:
                results = await self._runtime.ask_store(
                    backend, lambda: backend.store.record_progress(unknown)
                )
            except StoreUnavailable:
                self._record_later(backend, unknown)
                results = [None] * len(unknown)
            for progress, found in zip(unknown, results, strict=True):
                targets[progress] = found
                if found is not None:
                    self._remember(backend.is_shared, progress, found)
        return [targets[each] for each in updates]

    def _record_later(self, backend: Backend, updates: Sequence[Progress]) -> None:
        is_waiting = bool(self._overdue)
        self._overdue |= dict.fromkeys(updates[: _MAX_CALLS - len(self._overdue)])
        if not is_waiting:
            self._runtime.background.spawn(self._record_overdue, backend)

    async def _record_overdue(self, backend: Backend) -> None:
        try:
            while batch := list(islice(self._overdue, _MAX_BATCH_SIZE)):
                await self._runtime.retry.until_available(
                    partial(backend.store.record_progress, batch)
                )
                for progress in batch:
                    del self._overdue[progress]
        finally:
            self._overdue.clear()

    def _remember(self, is_shared: bool, progress: Progress, target: ProgressRecorded) -> None:
        idle_timeout = target.idle_timeout
        age = (
            _MAX_AGE
            if idle_timeout is None
            else min(_MAX_AGE, idle_timeout.total_seconds() * _MAX_AGE_IN_IDLE_TIMEOUTS)
        )
        self._known[is_shared, progress] = target, self._now() + age
        self._known.move_to_end((is_shared, progress))
        if len(self._known) > _MAX_CALLS:
            self._known.popitem(last=False)
