"""Random signals to one task, which fails and is resumed: none is lost, repeated or overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import ALL, FIRST
from meshpoint.model.mailbox import MailAccepted, MailRefused, SendSignal
from meshpoint.model.operations import Revived
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import Reply, Run
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    FAILED,
    HERE,
    HOUR,
    SECOND,
    TIMINGS,
    a_pause,
    a_requester,
    a_revive,
    an_end,
    one,
    operating,
    write_end,
)
from meshpoint.testing.conformance.store_last_pause import resume_at_pause
from meshpoint.testing.conformance.store_mailbox import a_receive, a_signal

ACTIONS = ("repeat", "receive", "race", "crash", "suspend", "expire", "fail", "restart", "resume")
actions = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", *ACTIONS]),
        st.sampled_from(["chat", "stop"]),
        st.integers(1, 3),
    ),
    max_size=40,
)


def open_sqlite(folder: Path, clock: FakeClock) -> CheckpointStore:
    return SqlStore(f"sqlite:///{folder}/tasks.db", namespace="test", clock=clock)


def open_in_process(folder: Path, clock: FakeClock) -> CheckpointStore:
    return InProcessStore(clock, timings=TIMINGS)


class _Driver:
    """Drives one operation, and records sent and received values by name.

    After a resume at its last pause, the operation sees the values of that pause again.
    """

    def __init__(self, store: CheckpointStore, clock: FakeClock) -> None:
        self._store, self._clock = store, clock
        self.sent: dict[str, list[int]] = {"chat": [], "stop": []}
        self.received: dict[str, list[int]] = {"chat": [], "stop": []}
        self._before_pause = self.received
        self._accepted: list[SendSignal] = []
        self._numbers = count(1)
        self._run: Run | None = None
        self._has_ended = self._has_paused = False

    async def begin(self) -> None:
        self._run = await operating(self._store)
        self.task_id = self._run.task_id

    async def act(self, action: str, name: str, number: int) -> None:
        match action:
            case "send":
                await self._send(name)
            case "repeat" if self._accepted:
                await self._repeat(self._accepted[number % len(self._accepted)])
            case "receive" | "race" if self._run is not None:
                await self._pause(self._run, name, number, is_race=action == "race")
            case "crash" if self._run is not None:
                self._clock.advance(HOUR)
                self._run = one(await self._store.rescue(HERE, 10, 10)).run
            case "suspend" if not self._has_ended:
                await self._store.suspend([self.task_id])
                await self._continue()
                await self._store.unsuspend([self.task_id])
            case "expire" if self._run is None and not self._has_ended:
                self._clock.advance(HOUR + SECOND)
                await self._store.expire(HERE, 10, 0)
            case "fail" if self._run is not None:
                await write_end(self._store, an_end(self._run, FAILED, reason="no"))
                self._run, self._has_ended = None, True
            case "restart" if self._has_ended:
                command = a_revive(self.task_id, without_checkpoint=True, requester=a_requester())
                assert isinstance(await self._store.revive(command), Revived)
                self._has_ended = self._has_paused = False
                self._before_pause = _copy(self.received)
            case "resume" if self._has_ended and self._has_paused:
                await resume_at_pause(self._store, self.task_id)
                self._has_ended, self.received = False, _copy(self._before_pause)
        await self._continue()

    async def _send(self, name: str) -> None:
        command = a_signal(self.task_id, next(self._numbers), name)
        result = one(await self._store.signal([command]))
        if self._has_ended:
            assert isinstance(result, MailRefused)
            return
        assert isinstance(result, MailAccepted)
        self._accepted.append(command)
        self.sent[name].append(int(command.value))

    async def _repeat(self, command: SendSignal) -> None:
        result = one(await self._store.signal([command]))
        kept = [each.id for each in (await self._store.mailbox(self.task_id)).signals]
        is_lost = self._has_ended and command.id in kept
        assert isinstance(result, MailRefused if is_lost else MailAccepted)
        other = replace(command, value=b"0")
        assert isinstance(one(await self._store.signal([other])), MailRefused)

    async def _pause(self, run: Run, name: str, number: int, *, is_race: bool) -> None:
        waits = [a_receive(name, HOUR, call_id=f"{name}.{n}") for n in range(number)]
        if is_race:
            waits.append(a_receive("stop", HOUR, call_id="stop.x"))
        pause = a_pause(*waits, run=run, join=FIRST if is_race else ALL)
        first = await self._store.pause([pause])
        assert await self._store.pause([pause]) == first  # its answer was lost
        self._before_pause = _copy(self.received)
        self._run, self._has_paused = None, True

    async def _continue(self) -> None:
        for task in await self._store.acquire(HERE, 10, 10):
            for call_id, _, outcome in task.outcomes:
                if isinstance(outcome, Ok):
                    assert isinstance(outcome.value, int)
                    self.received[call_id.partition(".")[0]].append(outcome.value)
            self._run = task.run

    async def finish(self) -> None:
        """Receive what is left."""
        await self.act("restart", "chat", 1)
        await self.act("expire", "chat", 1)
        for name in self.sent:
            left = len(self.sent[name]) - len(self.received[name])
            for _ in range(left):
                await self.act("receive", name, 1)
        assert (await self._store.mailbox(self.task_id)).signals == ()


def _copy(received: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: list(values) for name, values in received.items()}


@pytest.mark.parametrize("open_store", [open_in_process, open_sqlite])
@settings(max_examples=40, deadline=None)
@given(steps=actions)
def test_every_signal_is_received_once_and_in_order(
    open_store: Callable[[Path, FakeClock], CheckpointStore],
    steps: list[tuple[str, str, int]],
) -> None:
    async def run() -> None:
        clock = FakeClock()
        with TemporaryDirectory() as folder:
            store = open_store(Path(folder), clock)
            await store.open()
            try:
                driver = _Driver(store, clock)
                await driver.begin()
                for step in steps:
                    await driver.act(*step)
                await driver.finish()
                assert driver.received == driver.sent
                assert all(isinstance(each, Reply) for each in await store.unsent(AGENT, 10))
            finally:
                await store.close()

    asyncio.run(run())
