"""The resources that agents hold once per replica, such as clients and tool servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

from meshpoint.engine.containment import EXITS, is_user_interrupt
from meshpoint.engine.segment import Agent
from meshpoint.errors import ConfigurationError
from meshpoint.model.error_text import describe_exception
from meshpoint.ports.agent import HasLifespan, list_versions

log = logging.getLogger("meshpoint.engine")


class Lifespan:
    """Enters and leaves the lifespans of an agent's versions.

    An asyncio task of its own does both, because the resources may have tasks and cancel scopes
    that must end where they began.

    Args:
        agent: The agent.
        on_failure: Called if the resources fail while the replica runs.

    Attributes:
        failure: The error that stops the replica, if the resources have failed.
    """

    def __init__(self, agent: Agent, on_failure: Callable[[], None]) -> None:
        self._name, self._on_failure = agent.name, on_failure
        self._versions = [each for each in list_versions(agent) if isinstance(each, HasLifespan)]
        self._resources: dict[str, Any] = {}
        self._is_entered, self._must_leave = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.failure: ConfigurationError | None = None

    @property
    def resources(self) -> Mapping[str, Any]:
        """What the lifespans have yielded, by the state formats of the versions."""
        return self._resources

    async def enter(self, timeout: timedelta) -> None:
        """Enter all lifespans.

        Raises:
            ConfigurationError: One has failed, or has not been entered within `timeout`.
        """
        if not self._versions:
            return
        self._task = asyncio.create_task(
            self._hold_without_exits(), name=f"lifespan of {self._name}"
        )
        entered = asyncio.ensure_future(self._is_entered.wait())
        try:
            await asyncio.wait(
                {self._task, entered},
                timeout=timeout.total_seconds(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._is_entered.is_set():
                self._task.add_done_callback(self._check_end)
            elif self._task.done():
                raise self._describe("failed", self._task)
            else:
                problem = f"did not start within {timeout.total_seconds():g} seconds"
                raise ConfigurationError(
                    f"agent {self._name!r}, lifespan", problem, "check the services that it uses"
                )
        finally:
            entered.cancel()

    async def _hold(self) -> None:
        async with AsyncExitStack() as stack:
            for version in self._versions:
                value = await stack.enter_async_context(version.lifespan())
                self._resources[version.state_format] = value
            self._is_entered.set()
            await self._must_leave.wait()

    async def _hold_without_exits(self) -> None:
        """Hold them. An exit in their code would end the event loop, with all its replicas."""
        try:
            await self._hold()
        except EXITS as error:
            if is_user_interrupt(error):
                raise
            raise RuntimeError(describe_exception(error)) from error

    def _check_end(self, task: asyncio.Task[None]) -> None:
        """Stop the replica if its lifespans have ended before it leaves them."""
        if not self._must_leave.is_set():
            self.failure = self._describe("ended while the replica was running", task)
            self._on_failure()

    def _describe(self, what: str, task: asyncio.Task[None]) -> ConfigurationError:
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = "" if error is None else f": {' '.join(describe_exception(error).split())}"
        failure = ConfigurationError(
            f"agent {self._name!r}, lifespan",
            f"{what}{reason}",
            "check the services that it uses",
        )
        failure.__cause__ = error
        return failure

    async def leave(self) -> None:
        """Leave all lifespans, once no code of the agent runs.

        Raises:
            Exception: One could not be left cleanly.
        """
        self._must_leave.set()
        if (task := self._task) is None:
            return
        if not self._is_entered.is_set():
            task.cancel()
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # if leaving takes too long
        if self._is_entered.is_set() and self.failure is None and not task.cancelled():
            task.result()
