"""What all rooms of one worker share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from meshpoint.engine.retry import Patience
from meshpoint.engine.slots import Slots
from meshpoint.model.checkpoint import Replica
from meshpoint.model.ids import AgentName
from meshpoint.model.options import Options
from meshpoint.ports.agent import Plan
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Broker
from meshpoint.ports.clock import Clock
from meshpoint.ports.observer import Steps
from meshpoint.subtasks.checkpointer import AgentCheckpointer
from meshpoint.working_memory.task_memory import MemoryServices

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a step beside the others, in the worker's task group."""


@dataclass(frozen=True, slots=True)
class Site:
    """One agent in one replica: its homes, its broker, its limits.

    `durable` is the home of paused tasks, None when they stay in memory. `plan` is what the agent says of its
    operations. `apart` has one place, for the suspect that runs separately because it may have killed its owners.
    """

    replica: Replica
    broker: Broker
    durable: Home | None
    memory: Home
    options: Options
    clock: Clock
    slots: Slots
    apart: Slots
    patience: Patience
    steps: Steps
    plan: Plan
    checkpointers: Mapping[bool, AgentCheckpointer]  # by whether a home is durable
    memories: Mapping[bool, MemoryServices]  # as the checkpointers

    @property
    def agent(self) -> AgentName:
        """The agent that is served."""
        return self.replica.agent

    def checkpointer(self, home: Home) -> AgentCheckpointer:
        """What writes and restores the checkpoints of operations in `home`."""
        return self.checkpointers[home.durable]

    @property
    def homes(self) -> tuple[Home, ...]:
        """Where tasks may be kept, the preferred one first."""
        return (self.memory,) if self.durable is None else (self.durable, self.memory)
