"""Updates with numbers: none is repeated, and none of an outdated run is shown."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import JsonValue

from idle_loop import idle
from meshpoint import ArtifactUpdate, Ended, Ok, StatusUpdate, TaskHandle, TextDelta, Update
from meshpoint.model.bodies import A2AMessage, A2ATaskState, Part, StatusBody, TaskStatus
from meshpoint.model.bodies import StatusUpdate as StatusUpdateBody
from meshpoint.model.messages import Message, MessageType
from meshpoint.model.status_metadata import (
    MAX_PATH_LENGTH,
    StatusMetadata,
    StatusNumber,
    UpdateKind,
)

from .calling import ROME, Call, Plan, travel

FIRST, SECOND = "01941f29-0001", "01941f29-0002"


class Sender:
    """Sends updates of one task with the metadata of the test's choice."""

    def __init__(self, call: Call, task: TaskHandle[Plan], request: Message) -> None:
        self._call, self.task, self.request = call, task, request

    async def send(self, content: JsonValue, metadata: Any, **fields: Any) -> None:
        message = A2AMessage(message_id="m", role="ROLE_AGENT", parts=[Part(data=content)])
        status = TaskStatus(state=A2ATaskState.WORKING, message=message)
        update = StatusUpdateBody(task_id=self.task.id, status=status, metadata=metadata)
        body = StatusBody(status_update=update).to_bytes()
        await self._call.agent.send_back(self.request, MessageType.STATUS, body=body, **fields)

    async def status(
        self, content: JsonValue, number: tuple[int, int, str, int] | None, **fields: Any
    ) -> None:
        known = None if number is None else StatusNumber(*number)
        await self.send(content, StatusMetadata(number=known, **fields).to_json())

    async def end(self, outcome: JsonValue | Ok[JsonValue] = None) -> list[Update]:
        await idle()
        await self._call.agent.respond(self.request, outcome or {"text": "by train"})
        return [each async for each in self.task.updates()]


@pytest.fixture
async def sender(call: Call) -> Sender:
    task = await call.mesh.send(travel, ROME)
    return Sender(call, task, await call.agent.wait_for_request())


def shown(updates: list[Update]) -> list[tuple[JsonValue, bool]]:
    """The messages, and whether each is a reset."""
    return [(each.message, each.reset) for each in updates if isinstance(each, StatusUpdate)]


async def test_repeated_and_overtaken_updates_are_dropped(sender: Sender) -> None:
    for position in (1, 2, 2, 4, 3, 1, 5):
        await sender.status(position, (0, 0, FIRST, position))
    assert shown(await sender.end()) == [(1, False), (2, False), (4, False), (5, False)]


async def test_a_run_that_repeats_an_earlier_one_begins_with_a_reset(sender: Sender) -> None:
    await sender.status("a", (0, 0, FIRST, 7))
    await sender.status("b", (0, 0, SECOND, 1))
    await sender.status("c", (0, 0, SECOND, 2))
    assert shown(await sender.end()) == [("a", False), ("b", True), ("c", False)]


async def test_a_run_after_a_pause_repeats_nothing(sender: Sender) -> None:
    await sender.status("a", (0, 0, SECOND, 7))
    await sender.status("b", (1, 1, FIRST, 1))
    assert shown(await sender.end()) == [("a", False), ("b", False)]


async def test_an_attempt_from_the_beginning_is_a_reset(sender: Sender) -> None:
    await sender.status("a", (4, 5, FIRST, 7))
    await sender.status("b", (0, 6, SECOND, 1))
    assert shown(await sender.end()) == [("a", False), ("b", True)]


@pytest.mark.parametrize("fences", [(1, 2), (0, 2), (3, 3)])
async def test_a_zombie_is_not_shown(sender: Sender, fences: tuple[int, int]) -> None:
    zombie, owner = fences
    await sender.status("a", (0, zombie, FIRST, 1))
    await sender.status("b", (0, owner, SECOND, 1))
    for position in range(2, 9):
        await sender.status("zombie", (0, zombie, FIRST, position))
    await sender.status("c", (0, owner, SECOND, 2))
    assert shown(await sender.end()) == [("a", False), ("b", True), ("c", False)]


async def test_a_task_that_gets_a_row_continues_its_run(sender: Sender) -> None:
    await sender.status("a", (0, 0, FIRST, 1))
    await sender.status("b", (0, 1, FIRST, 2))
    assert shown(await sender.end()) == [("a", False), ("b", False)]


async def test_peers_have_numbers_of_their_own(sender: Sender) -> None:
    for source in ("task-1", "task-2"):
        for position in (1, 2, 1):
            await sender.status(
                f"{source} {position}", (0, 0, FIRST, position), path=("rail",), source=source
            )
    await sender.status("own", (0, 0, FIRST, 1))
    updates = await sender.end()
    assert [message for message, _ in shown(updates)] == [
        "task-1 1",
        "task-1 2",
        "task-2 1",
        "task-2 2",
        "own",
    ]
    assert [(each.path, each.task_id) for each in updates[:-1]] == [
        *[(("rail",), "task-1")] * 2,
        *[(("rail",), "task-2")] * 2,
        ((), sender.task.id),
    ]
    assert len({each.id for each in updates}) == len(updates)


async def test_updates_of_an_earlier_release_are_all_shown(sender: Sender) -> None:
    for _ in range(3):
        await sender.status("same", None)
    updates = await sender.end()
    assert shown(updates) == [("same", False)] * 3
    assert len({each.id for each in updates}) == len(updates)
    assert {each.generation for each in updates} == {None}


BAD_METADATA: list[JsonValue] = [
    {"generation": True, "fence": 0, "run": "r", "position": 1},
    {"generation": 0, "fence": -1, "run": "r", "position": 1},
    {"generation": 0, "fence": 0, "run": "", "position": 1},
    {"generation": 0, "fence": 0, "run": "r\n", "position": 1},
    {"generation": 0, "fence": 0, "run": "r", "position": 2**60},
    {"generation": 0, "fence": 0, "run": "r", "position": 1.5},
    {"path": ["rail"] * (MAX_PATH_LENGTH + 1), "source": "s"},
    {"path": ["no name"], "source": "s"},
    {"path": ["rail"], "source": 7},
    {"path": ["rail"]},
    {"path": {}, "source": "s"},
    {"kind": ["text"]},
    {"kind": "later"},
]


@pytest.mark.parametrize("metadata", BAD_METADATA)
async def test_invalid_metadata_counts_as_missing(sender: Sender, metadata: JsonValue) -> None:
    await sender.send("a", metadata)
    await sender.send("b", metadata)
    first, second, _ = await sender.end()
    for update in (first, second):
        assert isinstance(update, StatusUpdate)
        assert (update.path, update.generation, update.reset) == ((), None, False)


async def test_few_numbers_are_kept(sender: Sender) -> None:
    for number in range(1_500):
        await sender.status(number, (0, 0, FIRST, 1), path=("rail",), source=f"task-{number}")
    await idle()
    assert len(sender.task._task._order._latest) == 1_000


async def test_text_and_artifacts_arrive_before_the_end(sender: Sender) -> None:
    map_: JsonValue = {"artifactId": "map"}
    number = StatusNumber(0, 0, FIRST, 1)
    await sender.send("by ", StatusMetadata(UpdateKind.TEXT, number).to_json())
    number = StatusNumber(0, 0, FIRST, 2)
    await sender.send(map_, StatusMetadata(UpdateKind.ARTIFACT, number).to_json())
    outcome = Ok[JsonValue]({"text": "by train"}, ({"artifactId": "map"}, {"artifactId": "bill"}))
    text, artifact, rest, end = await sender.end(outcome)
    assert isinstance(text, TextDelta)
    assert text.text == "by "
    assert isinstance(artifact, ArtifactUpdate)
    assert artifact.artifact == map_
    assert isinstance(rest, ArtifactUpdate), "the other one was shown already"
    assert rest.artifact == {"artifactId": "bill"}
    assert isinstance(end, Ended)


async def test_content_that_does_not_fit_its_kind_is_a_status(sender: Sender) -> None:
    await sender.send({"a": 1}, {"kind": "text"})
    await sender.send("a", {"kind": "artifact"})
    assert [each.kind for each in await sender.end()] == ["status", "status", "ended"]


async def test_an_iterator_continues_behind_an_update(sender: Sender) -> None:
    for position in range(1, 6):
        await sender.status(position, (0, 0, FIRST, position))
    outcome = Ok[JsonValue]({"text": "by train"}, ({"artifactId": "a"}, {"artifactId": "b"}))
    everything = await sender.end(outcome)
    assert [each.kind for each in everything] == [*["status"] * 5, *["artifact"] * 2, "ended"]
    for index, update in enumerate(everything, 1):
        rest = [each.id async for each in sender.task.updates(after=update.id)]
        assert rest == [each.id for each in everything[index:]]


async def test_an_iterator_that_cannot_continue_begins_with_a_reset(sender: Sender) -> None:
    for position in range(1, 31):
        await sender.status(position, (0, 0, FIRST, position))
    await sender.end()
    for unknown in (f"0.0.{FIRST}.3", "of another process", ""):
        updates = [each async for each in sender.task.updates(after=unknown)]
        assert shown(updates) == [(23, True), *[(number, False) for number in range(24, 31)]]
        assert not updates[-1].reset
