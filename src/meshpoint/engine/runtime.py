"""State shared by all steps of one worker."""

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
"""Runs a step concurrently in the worker's task group."""


@dataclass(frozen=True, slots=True)
class Site:
    """One agent in one replica: its homes, its broker, its limits.

    `durable` is the home of paused tasks, or `None` if they stay in memory. `plan` describes the
    agent's operations. `apart` has a single place for suspects, which run isolated because they
    may have killed their owners.
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
    checkpointers: Mapping[bool, AgentCheckpointer]  # keyed by `Home.durable`
    memories: Mapping[bool, MemoryServices]  # keyed by `Home.durable`

    @property
    def agent(self) -> AgentName:
        """The agent served by this worker."""
        return self.replica.agent

    def checkpointer(self, home: Home) -> AgentCheckpointer:
        """Return the checkpointer for operations in `home`."""
        return self.checkpointers[home.durable]

    @property
    def homes(self) -> tuple[Home, ...]:
        """The homes that can store tasks, the preferred home first."""
        return (self.memory,) if self.durable is None else (self.durable, self.memory)
