"""Where a task lives between its segments: one code path, two homes."""

from __future__ import annotations

from dataclasses import dataclass

from meshpoint.model.messages import Address
from meshpoint.ports.task_store import CheckpointStore


@dataclass(frozen=True, slots=True)
class Home:
    """A store, and the address at which responses find it.

    The database's address is shared by all replicas; the memory's is the private queue of its replica. So a
    response always arrives where its call is kept.
    """

    store: CheckpointStore
    reply_to: Address

    @property
    def durable(self) -> bool:
        """Whether its tasks outlive the process; then their messages are acked at the checkpoint."""
        return self.store.durable
