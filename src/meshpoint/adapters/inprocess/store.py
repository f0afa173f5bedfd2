"""The in-process store, for tasks without durable checkpoints and for tests."""

from __future__ import annotations

from datetime import datetime

from meshpoint.adapters.inprocess.catalog import InProcessCatalog
from meshpoint.adapters.inprocess.due import InProcessDueWork
from meshpoint.adapters.inprocess.fleet import InProcessFleet
from meshpoint.adapters.inprocess.mailbox import InProcessMailbox
from meshpoint.adapters.inprocess.operations import InProcessOperations
from meshpoint.adapters.inprocess.outbox import InProcessOutbox
from meshpoint.adapters.inprocess.rows import Tables
from meshpoint.adapters.inprocess.transitions import InProcessTransitions
from meshpoint.model.options import StoreTimings
from meshpoint.ports.clock import Clock


class InProcessStore(
    InProcessTransitions,
    InProcessMailbox,
    InProcessDueWork,
    InProcessOutbox,
    InProcessCatalog,
    InProcessOperations,
    InProcessFleet,
):
    """A `meshpoint.ports.task_store.CheckpointStore` whose tasks are lost with the process.

    No method awaits anything, so each is atomic on the event loop: even cancelling the caller
    cannot leave a transition half done.

    An ended task remains as a tombstone with its reply for `timings.tombstone_ttl`. With
    `max_ended`, it is forgotten once its reply is sent, and only the last `max_ended` ids are
    kept. A duplicate of such a request is recognized and not answered again.
    """

    def __init__(
        self, clock: Clock, *, timings: StoreTimings, max_ended: int | None = None
    ) -> None:
        self._tables = Tables(clock, timings, max_ended)
        self._registered = {}

    @property
    def durable(self) -> bool:
        """`False`: tasks are lost with the process."""
        return False

    @property
    def clock_offset(self) -> None:
        """`None`: it uses this host's clock."""
        return None

    @property
    def current_time(self) -> datetime:
        """The current time by this store's clock."""
        return self._tables.clock.now()

    async def open(self) -> None:
        """Do nothing: there is no connection."""

    async def close(self) -> None:
        """Do nothing: tasks are released with this object."""
