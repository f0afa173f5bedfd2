"""Record what commands change for many tasks or letters in the audit that the dashboard shows."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshpoint.cli.output import print_note
from meshpoint.errors import MeshpointError
from meshpoint.interventions import current_user
from meshpoint.model.error_text import describe_exception, quantity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from pydantic import JsonValue

    from meshpoint.ports.operator_store import OperatorStore


@dataclass(frozen=True, slots=True)
class Action:
    """What a command is about to do.

    Attributes:
        name: As the dashboard calls the same action.
        target: An agent, a letter, or which of them.
        details: How the command chose what to change.
        result: What it does to tasks, with a place for their number.
    """

    name: str
    target: str
    details: dict[str, JsonValue] = field(default_factory=dict)
    result: str = "changed {}"

    def describe(self, count: int) -> str:
        """The result of changing `count` tasks, in a few words."""
        return self.result.format(quantity(count, "task"))


class Record:
    """The record of an action. Without a store, or if that refuses it, nothing is recorded."""

    def __init__(self, store: OperatorStore | None, action: Action | None) -> None:
        self._store, self._action = store, action
        self._id: str | None = None

    async def begin(self) -> None:
        """Record that the action begins. Later calls change nothing."""
        if self._store is None or self._action is None or self._id is not None:
            return
        action, actor = self._action, current_user()
        try:
            self._id = await self._store.record_action(
                actor, action.name, action.target, action.details
            )
        except MeshpointError as error:
            self._give_up(error)

    async def complete(self, result: str, *, succeeded: bool) -> None:
        """Record the result of an action that has begun."""
        if self._store is None or self._id is None:
            return
        try:
            await self._store.complete_action(self._id, succeeded=succeeded, result=result)
        except MeshpointError as error:
            self._give_up(error)

    def _give_up(self, error: MeshpointError) -> None:
        print_note(f"the audit does not record this: {error}")
        self._store = None


@asynccontextmanager
async def recorded(
    store: OperatorStore | None, action: Action | None, describe: Callable[[], str]
) -> AsyncIterator[Record]:
    """Yield a record, and complete it at the end of the block with what `describe` returns."""
    record = Record(store, action)
    try:
        yield record
    except BaseException as error:
        reason = str(error) if isinstance(error, MeshpointError) else describe_exception(error)
        await record.complete(f"{describe()} before: {reason}", succeeded=False)
        raise
    await record.complete(describe(), succeeded=True)


@asynccontextmanager
async def recorded_in_mesh(
    config: Path | None, namespace: str, action: Action, describe: Callable[[], str]
) -> AsyncIterator[Record]:
    """Like `recorded`, in the first database that a configuration names.

    An action on a broker must not fail because no database answers.
    """
    from meshpoint.cli.sources import check_file_exists
    from meshpoint.settings import load
    from meshpoint.settings.choosing import stores_of
    from meshpoint.wiring import make_operator_store

    async with AsyncExitStack() as stack:
        store: OperatorStore | None = None
        for settings in stores_of(load([config]))[:1] if config is not None else ():
            opened = make_operator_store(settings, namespace)
            stack.push_async_callback(opened.close)
            try:
                check_file_exists(settings.url)
                await opened.open()
                store = opened
            except MeshpointError as error:
                print_note(f"the audit does not record this: {error}")
        record = await stack.enter_async_context(recorded(store, action, describe))
        await record.begin()
        yield record
