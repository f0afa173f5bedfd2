"""With encryption, no canary is found in what the store keeps, and keys can be replaced."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from sealed_stores import (
    CANARY,
    NEW,
    OLD,
    WORD,
    a_ring,
    act,
    columns_with,
    encoded_forms,
    fill,
    open_sealed,
)
from sqlalchemy import text

from meshpoint.adapters.encryption import KeyRing, to_text
from meshpoint.adapters.sql import SqlStore, resealing
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.inventory import DIGESTED, SEALED
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.conversations import ConversationKey, SqlConversations
from meshpoint.errors import ConfigurationError, KeyMissing
from meshpoint.model.tasks import TaskFilter, TaskState
from meshpoint.model.transitions import BeginCommitted, JoinCompleted, Pause, Save
from meshpoint.ports.inspection import AgentKeys
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    a_begin,
    a_checkpoint,
    a_claim,
    a_pause,
    a_record,
    a_release,
    an_end,
    an_operation,
    ok,
    one,
    outcomes,
    paused,
    ready,
    reply_of,
    resumed,
    row,
    write_pause,
)
from meshpoint.testing.conformance.store_fleet import a_registration

QUALIFIED = f"test/{AGENT}"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def database_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.mark.parametrize("archive", [True])
async def test_canaries_are_found_only_in_the_clear(
    database_url: str, tmp_path: Path, archive: bool
) -> None:
    forms = encoded_forms(CANARY)
    async with open_sealed(database_url, a_ring(NEW), archive=archive) as store:
        await fill(store)
        assert await columns_with(database_url, *forms) == set()
        if database_url.startswith("sqlite"):  # before the WAL is merged
            for file in tmp_path.glob("*.db*"):
                assert not any(form in file.read_bytes() for form in forms), file


async def test_without_keys_each_place_has_a_canary(database_url: str) -> None:
    async with open_sealed(database_url, None, archive=True) as store:
        await fill(store)
    found = await columns_with(database_url, CANARY.encode())
    places = {f"{each.table}.{each.column}" for each in SEALED} | set(DIGESTED)
    assert places - found == {"agent_task_signals.digest"}  # it has only a digest of one


async def test_keys_are_replaced_and_removed(database_url: str) -> None:
    async with open_sealed(database_url, None, archive=True) as store:
        await fill(store)
    await _reseal(database_url, a_ring(OLD))
    async with open_sealed(database_url, a_ring(OLD), archive=True) as store:
        await fill(store)
    old, new = a_ring(OLD).key_id(), a_ring(NEW).key_id()
    found = await _reseal(database_url, a_ring(NEW, OLD))
    assert found.unused == (old,)
    assert set(found.values) == {new}
    assert found.clear == found.damaged == 0
    assert await columns_with(database_url, *encoded_forms(CANARY)) == set()
    async with open_sealed(database_url, a_ring(NEW)) as store:
        await _read_all(store)
    cleared = await _reseal(database_url, a_ring(b"", NEW))
    assert not cleared.values
    assert cleared.unused == (new,)
    async with open_sealed(database_url, None) as store:
        await _read_all(store)


async def test_resealing_under_load_loses_nothing(database_url: str) -> None:
    async with open_sealed(database_url, a_ring(OLD)) as store:
        waiting = [await paused(store, "a", "b", state=b"%d" % number) for number in range(20)]
    async with open_sealed(database_url, a_ring(NEW, OLD)) as store:
        stop, found = asyncio.Event(), list[AgentKeys]()

        async def keep_resealing() -> None:
            while not stop.is_set():
                found.append(await _reseal(database_url, a_ring(NEW, OLD)))

        async def run(pause: Pause) -> None:
            await store.claim([a_claim(pause, "a", ok(["a", pause.run.task_id]))], HERE, 0)
            (result,) = await store.claim([a_claim(pause, "b", ok("b"))], HERE, 1)
            assert isinstance(result, JoinCompleted)
            task = result.task
            assert task.state == pause.state
            assert outcomes(task) == {"a": ok(["a", pause.run.task_id]), "b": ok("b")}
            again = a_pause(run=task.run, state=b"again " + pause.state)
            await write_pause(store, again)
            task = await resumed(store, again)
            assert task.state == again.state
            assert await store.end([an_end(task.run, reply=b"reply to " + pause.state)])

        resealing_ = asyncio.create_task(keep_resealing())
        await asyncio.gather(*map(run, waiting))
        stop.set()
        await resealing_
        for pause in waiting:
            reply = await reply_of(store, pause.run.task_id)
            assert reply.body == b"reply to " + pause.state
    assert found
    last = await _reseal(database_url, a_ring(NEW, OLD))
    assert set(last.values) == {a_ring(NEW).key_id()}
    async with open_sealed(database_url, a_ring(NEW)) as store:
        for pause in waiting:
            assert (await reply_of(store, pause.run.task_id)).body.startswith(b"reply to ")


async def _reseal(url: str, ring: KeyRing) -> AgentKeys:
    async with open_sealed(url, ring, replica=False) as store:
        return await resealing.reseal(store._database, QUALIFIED)


async def _read_all(store: SqlOperatorStore) -> None:
    """Read everything that `fill` wrote; it must be as it was."""
    for action in (await store.actions(limit=9)).items:
        assert (action.details, action.result) == ({"answer": CANARY}, f"not {CANARY}")
    failed = 0
    tasks = await store.tasks(where=TaskFilter(), limit=1000)
    assert len(tasks) >= 12
    for task in tasks:
        await store.lookup([task.task_id])
        await store.task(task.task_id)
        mailbox = await store.mailbox(task.task_id)
        assert all(WORD.encode() in value for _, value in mailbox.values)
        for checkpoint in await store.history(task.task_id):
            assert checkpoint.subject in {CANARY, "ACME"}
            assert checkpoint.subtasks[0].result
        if (operation := await store.operation(task.task_id)) is not None:
            assert operation.parameters == {"of": WORD}
            last = await store.last_pause(task.task_id)
            if last is not None:
                failed += 1
                assert last.state == WORD.encode()
                assert last.context["security_context"] == {"token": WORD}
        if not task.state.is_final:
            stored = await store.stored_task(task.task_id)
            assert stored is not None
    assert failed == 2
    user = TaskFilter(user=CANARY)
    assert len(await store.tasks(where=user)) == 2
    assert len(await store.tasks(where=TaskFilter(subject=CANARY))) == 4


async def test_a_replica_without_a_used_key_refuses_to_start(database_url: str) -> None:
    async with open_sealed(database_url, a_ring(OLD)) as store:
        await fill(store)
    for ring in (None, a_ring(NEW)):
        with pytest.raises(ConfigurationError, match=f"has no key {a_ring(OLD).key_id()}"):
            async with open_sealed(database_url, ring):
                pass
    async with open_sealed(database_url, a_ring(NEW, OLD)) as store:
        await _read_all_of_one(store)


async def _read_all_of_one(store: SqlStore) -> None:
    assert len(await store.tasks(where=TaskFilter(user=CANARY))) == 1


async def test_a_task_whose_key_is_missing_stays_as_it_is(database_url: str) -> None:
    async with open_sealed(database_url, a_ring(NEW)) as store:
        pause = await ready(store)
    async with open_sealed(database_url, a_ring(OLD), replica=False) as store:
        assert await store.acquire(HERE, 10) == []
        (task, (call,)) = await row(store, pause.run.task_id)
        assert (task.state, task.attempt) == (TaskState.READY, 1)
        assert call.message is not None
        assert f"sealed with key {a_ring(NEW).key_id()}" in call.message
    async with open_sealed(database_url, a_ring(NEW)) as store:
        (stored,) = (await store.stored_task(pause.run.task_id),)
        assert stored is not None
        assert stored.resumable.state == b"state"


async def test_a_value_opens_only_in_its_place(database_url: str) -> None:
    async with open_sealed(database_url, a_ring(NEW)) as store:
        one_, two = await paused(store), await paused(store)
        for statement in (
            "UPDATE agent_paused_tasks SET state = (SELECT o.state FROM agent_paused_tasks AS o "
            "WHERE o.logical_task_id = :other) WHERE logical_task_id = :task",
            "UPDATE agent_paused_tasks SET agent_name = 'test/hotels' "
            "WHERE logical_task_id = :task",
            "UPDATE agent_paused_tasks SET request = state WHERE logical_task_id = :task",
        ):
            pause = await paused(store)
            values = {"task": pause.run.task_id, "other": one_.run.task_id}

            async def move(
                tx: Transaction, statement: str = statement, values: Any = values
            ) -> None:
                await tx.connection.execute(text(statement), values)

            await store._database.transact(move)
            with pytest.raises(ValueError, match="was changed, or belongs elsewhere"):
                await store.stored_task(pause.run.task_id)
        assert await store.stored_task(two.run.task_id)


@pytest.mark.parametrize("ring", [None, a_ring(NEW)])
async def test_a_text_may_look_like_an_envelope(database_url: str, ring: KeyRing | None) -> None:
    """Senders choose the subjects of tasks, and agents choose the reasons of failures."""
    for text_ in ("sealed: a bid", to_text(a_ring(OLD).seal(b"x", ("a", "b")))):
        async with open_sealed(database_url, ring) as store:
            begin = a_begin(operation=an_operation(subject=text_, parameters={"of": "x"}))
            begun = one(await store.begin([begin]))
            assert isinstance(begun, BeginCommitted)
            run = begun.run
            record = a_record("fetch", json.dumps(text_))
            await store.save(
                Save(run, a_checkpoint(run, 1, record, subject=text_, failure_reason=text_))
            )
            operation = await store.operation(run.task_id)
            assert operation is not None
            assert operation.subject == text_
            (checkpoint,) = await store.history(run.task_id)
            assert (checkpoint.subject, checkpoint.failure_reason) == (text_, text_)
            assert checkpoint.subtasks[0].result == json.dumps(text_)
            (found,) = await store.tasks(where=TaskFilter(subject=text_))
            assert found.subject == text_
            await store.release([a_release(run, parked=text_)])
            (parked,) = await store.tasks(where=TaskFilter(subject=text_))
            assert parked.parked_reason == text_
        await _reseal(database_url, a_ring(NEW))
        async with open_sealed(database_url, a_ring(NEW)) as store:
            (found,) = await store.tasks(where=TaskFilter(subject=text_))
            assert found.subject == text_
        await _reseal(database_url, a_ring(b"", NEW))


async def test_a_value_copied_behind_the_page_is_found_by_another_pass(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transitions copy checkpoints while they run."""
    async with open_sealed(database_url, a_ring(OLD), archive=True) as store:
        await fill(store)
    change, copies = resealing._change, list[str]()

    async def change_and_copy(database: Any, each: Any, *arguments: Any) -> int:
        if each.table.name == "agent_checkpoints" and not copies:
            copies.append("copied")
            columns = [name for name in each.table.c.keys() if name != "seq"]  # noqa: SIM118
            listed = ", ".join(columns)
            statement = (
                f"INSERT INTO agent_checkpoints (seq, {listed}) "
                f"SELECT seq - 100, {listed} FROM agent_checkpoints"
            )

            async def copy(tx: Transaction) -> None:
                await tx.connection.execute(text(statement), {})

            await database.transact(copy)
        return await change(database, each, *arguments)

    monkeypatch.setattr(resealing, "_change", change_and_copy)
    found = await _reseal(database_url, a_ring(NEW, OLD))
    assert copies
    assert set(found.values) == {a_ring(NEW).key_id()}
    counted = await _count(database_url, a_ring(NEW, OLD))
    assert set(counted.values) == {a_ring(NEW).key_id()}


async def _count(url: str, ring: KeyRing) -> AgentKeys:
    async with open_sealed(url, ring, replica=False) as store:
        return await resealing.reseal(store._database, QUALIFIED, changes=False)


async def test_a_key_that_a_replica_still_uses_is_registered_again(database_url: str) -> None:
    """A replica of an earlier configuration may write after `db reseal` has read its tasks."""
    async with open_sealed(database_url, a_ring(OLD)) as replica:
        found = await _reseal(database_url, a_ring(NEW, OLD))
        assert found.unused == (a_ring(OLD).key_id(),)
        await paused(replica)
        await replica.register(a_registration())
    with pytest.raises(ConfigurationError, match=f"has no key {a_ring(OLD).key_id()}"):
        async with open_sealed(database_url, a_ring(NEW)):
            pass


async def test_records_of_actions_do_not_concern_the_keys_of_another_agent(
    database_url: str,
) -> None:
    async with open_sealed(database_url, a_ring(OLD)) as store:
        action = await act(store)
    found = await _reseal(database_url, a_ring(NEW))
    assert (found.values, found.changed, found.damaged) == ({}, 0, 0)
    async with open_sealed(database_url, a_ring(NEW), replica=False) as store:
        shown = await store.action(action)
        assert shown is not None
        assert f"sealed with key {a_ring(OLD).key_id()}" in f"{shown.details}"
        assert f"sealed with key {a_ring(OLD).key_id()}" in f"{shown.result}"


async def test_two_commands_reseal_at_once(database_url: str) -> None:
    async with open_sealed(database_url, a_ring(OLD), archive=True) as store:
        await fill(store)
        await fill(store)
    rings = [a_ring(NEW, OLD)] * 3
    await asyncio.gather(*(_reseal(database_url, ring) for ring in rings))
    async with open_sealed(database_url, a_ring(NEW)) as store:
        await _read_all(store)


async def test_conversations_are_resealed(database_url: str) -> None:
    old, new = (base64.b64encode(key).decode() for key in (OLD, NEW))
    keys = [ConversationKey("travel", "client", None, None, CANARY + str(n)) for n in range(3)]
    for given, key in zip(((), (old,), (old,)), keys, strict=True):
        conversations = SqlConversations(database_url, encryption_keys=given)
        for turn in range(70):
            await conversations.append(key, f"{turn}", "library", [CANARY])
    assert await SqlConversations(database_url, encryption_keys=(new, old)).reseal() == 210
    resealed = SqlConversations(database_url, encryption_keys=(new,))
    assert await resealed.reseal() == 0
    for key in keys:
        assert [turn.messages for turn in await resealed.load(key)] == [[CANARY]] * 50
    with pytest.raises(KeyMissing):
        await SqlConversations(database_url, encryption_keys=(old,)).reseal()
