"""`SqlConversations` on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import JsonValue
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from meshpoint.adapters.sql.engine import async_url
from meshpoint.conversations import ConversationKey, Conversations, SqlConversations
from meshpoint.errors import ConfigurationError, IncompatibleState, StoreUnavailable

KEY = ConversationKey("travel/pydantic-ai/1", "app", "ada", "user 1", "trip-7")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/conversations.db"
    found: str = request.getfixturevalue("empty_postgres_url")
    return found


async def execute(url: str, statement: str) -> None:
    engine = create_async_engine(async_url(url))
    async with engine.begin() as connection:
        await connection.execute(text(statement))
    await engine.dispose()


async def numbers(store: Conversations, key: ConversationKey = KEY) -> list[int]:
    return [each.number for each in await store.load(key)]


async def test_turns_come_back_as_they_were(url: str) -> None:
    store: Conversations = SqlConversations(url)
    assert await store.load(KEY) == []
    messages: list[JsonValue] = [{"text": "Grüße \u0000 \ud800 😀", "n": [1, 2.5, None, True]}]
    await store.append(KEY, "a", "2.68", messages, replaces=7)
    (turn,) = await SqlConversations(url).load(KEY)
    assert (turn.number, turn.task_id, turn.library, turn.replaces) == (1, "a", "2.68", 7)
    assert turn.messages == messages


async def test_a_task_adds_one_turn(url: str) -> None:
    store = SqlConversations(url)
    for task in ("a", "b", "a"):
        await store.append(KEY, task, "1", [task])
    assert [each.messages for each in await store.load(KEY)] == [["a"], ["b"]]
    assert [each.task_id for each in await store.load(KEY, (2, 9))] == ["b"]


async def test_meshes_of_two_namespaces_may_share_a_table(url: str) -> None:
    for store in (SqlConversations(url, namespace="a"), SqlConversations(url, namespace="b")):
        assert await store.load(KEY) == []
        await store.append(KEY, "task", "1", ["hello"])
        assert len(await store.load(KEY)) == 1
    assert await SqlConversations(url).load(KEY) == []


async def test_a_good_store_passes_the_check(url: str) -> None:
    await SqlConversations(url).check()


@pytest.mark.servers
async def test_a_wrong_password_or_database_is_one_clear_line(empty_postgres_url: str) -> None:
    found = make_url(empty_postgres_url)
    for wrong in (found.set(username="nobody", password="wrong"), found.set(database="gone")):
        store = SqlConversations(wrong.render_as_string(hide_password=False))
        with pytest.raises(
            ConfigurationError, match=r"database of conversations.*correct the URL"
        ):
            await store.check()
        with pytest.raises(StoreUnavailable, match="correct the URL of SqlConversations"):
            await store.load(KEY)


async def test_a_missing_directory_is_one_clear_line(tmp_path: Path) -> None:
    store = SqlConversations(f"sqlite:///{tmp_path}/gone/conversations.db")
    problem = r"^SqlConversations: there is no folder .*; create it"
    with pytest.raises(ConfigurationError, match=problem):
        await store.check()


async def test_a_file_that_is_no_database_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("no database, but notes\n" * 100)
    store = SqlConversations(f"sqlite:///{tmp_path}/notes.db")
    with pytest.raises(ConfigurationError, match="not a SQLite database; name another file"):
        await store.check()


async def test_every_part_of_the_key_counts(url: str) -> None:
    store = SqlConversations(url)
    await store.append(KEY, "a", "1", [])
    for part in ("agent", "requester", "login", "user_id", "context_id"):
        other = replace(KEY, **{part: "other \u0000"})
        assert await store.load(other) == []
    assert await store.load(replace(KEY, login=None)) == []
    await store.append(replace(KEY, user_id="\u0000", login=None, requester=None), "a", "1", [])
    assert await numbers(store) == [1]


async def test_the_latest_turns_are_loaded_and_old_ones_deleted(url: str) -> None:
    store = SqlConversations(url, max_turns=3)
    other = replace(KEY, context_id="other")
    await store.append(other, "a", "1", [])
    for number in range(1, 10):
        await store.append(KEY, f"task {number}", "1", [])
    assert await numbers(store) == [7, 8, 9]
    kept = await store.load(KEY, (1, 9))
    assert [each.number for each in kept] == [4, 5, 6, 7, 8, 9]
    assert await numbers(store, other) == [1]


async def test_replicas_that_start_at_once_create_one_table(url: str) -> None:
    stores = [SqlConversations(url) for _ in range(6)]
    await asyncio.gather(
        *(store.append(KEY, f"{index}", "1", []) for index, store in enumerate(stores))
    )
    assert await numbers(stores[0]) == [1, 2, 3, 4, 5, 6]


async def test_many_operations_wait_for_few_connections(url: str) -> None:
    store = SqlConversations(url)
    await asyncio.gather(*(store.append(KEY, f"{index % 15}", "1", []) for index in range(30)))
    assert await numbers(store) == [*range(1, 16)]


async def test_a_damaged_turn_is_named(url: str) -> None:
    store = SqlConversations(url)
    await store.append(KEY, "a", "1", ["x"])
    for damaged in ("[1", "{}"):
        await execute(url, f"UPDATE meshpoint_conversation_turns SET messages = '{damaged}'")
        with pytest.raises(IncompatibleState, match=r"turn 1 of the conversation, of task a, "):
            await store.load(KEY)


async def test_a_dropped_table_is_created_again(url: str) -> None:
    store = SqlConversations(url)
    await store.append(KEY, "a", "1", ["x"])
    await execute(url, "DROP TABLE meshpoint_conversation_turns")
    with pytest.raises(StoreUnavailable, match="meshpoint_conversation_turns"):
        await store.load(KEY)
    assert await store.load(KEY) == []


def test_one_object_serves_several_event_loops(url: str) -> None:
    store = SqlConversations(url)
    for task in ("a", "b"):
        asyncio.run(store.append(KEY, task, "1", []))
    assert asyncio.run(numbers(store)) == [1, 2]


async def test_a_new_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "conversations.db"
    await SqlConversations(f"sqlite:///{path}").load(KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_it_may_share_the_database_of_the_tasks(database_url: str) -> None:
    store = SqlConversations(database_url)
    await store.append(KEY, "a", "1", ["x"])
    assert await numbers(store) == [1]


@pytest.mark.servers
async def test_a_login_that_may_not_create_tables_uses_an_existing_one(
    empty_postgres_url: str,
) -> None:
    await SqlConversations(empty_postgres_url).load(KEY)
    await execute(empty_postgres_url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert await SqlConversations(empty_postgres_url).load(KEY) == []


async def test_no_database_is_unavailable(tmp_path: Path) -> None:
    nobody = SqlConversations("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(StoreUnavailable, match="conversations: "):
        await nobody.load(KEY)
    assert "secret" not in repr(SqlConversations("postgresql://ada:secret@localhost/x"))
    path = tmp_path / "text.db"
    path.write_text("no database" * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        await SqlConversations(f"sqlite:///{path}").load(KEY)
