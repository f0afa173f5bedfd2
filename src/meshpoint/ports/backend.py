"""Where a task lives between its segments: the database or the process, behind one interface."""

from __future__ import annotations

from dataclasses import dataclass

from meshpoint.model.messages import Address
from meshpoint.ports.task_store import CheckpointStore


@dataclass(frozen=True, slots=True)
class Home:
    """A store, and the address for responses to calls of tasks kept there.

    Replicas share the database's address. The in-process store uses its replica's private queue,
    so a response always reaches a replica that can see its call.
    """

    store: CheckpointStore
    reply_to: Address

    @property
    def durable(self) -> bool:
        """Whether tasks outlive the process. If so, their messages are acked at the checkpoint."""
        return self.store.durable
