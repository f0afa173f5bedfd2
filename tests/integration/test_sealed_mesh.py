"""A mesh with keys: no canary in its files, queues, Redis copies, logs and dead letters."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sealed_stores import CANARY, a_ring, encoded_forms, fill, open_sealed

from command_result import run_main
from meshpoint import Context, Peer, Question, QuestionUpdate, agent
from meshpoint.adapters import sealed_broker
from meshpoint.adapters.encryption import KeyRing, RingKey
from meshpoint.adapters.redis import RedisCheckpointCache, RedisSnapshotStore
from meshpoint.adapters.sealed_broker import SealedBroker, SealedDeadLetters
from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.adapters.sqlite_queue.dead_letters import SqliteDeadLetters
from meshpoint.errors import CheckpointError, ConsistencyError, KeyMissing
from meshpoint.local import local_mesh
from meshpoint.model.dead_letters import LetterFilter
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.memory import PackedSnapshot
from meshpoint.model.messages import dead_letter_queue
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.testing.conformance.broker import AGENT, REQUESTS, Inbox, a_message, until_depth
from servers import redis_client, redis_data_key

OLD, NEW = b"o" * 32, b"n" * 32
KEYS = {name: base64.b64encode(name.encode() * 32).decode() for name in ("o", "n")}
ghost = Peer("ghost", str, str)
approval = Question("approval", str)


@agent("teller")
async def teller(ctx: Context, secret: str) -> str:
    ctx.flags["secret"] = secret
    await ctx.update_status(f"thinking of {secret}")
    return await ctx.wait_for(approval, prompt=secret)


def files_with(folder: Path, *needles: bytes) -> list[str]:
    """The files in which any of `needles` is found."""
    return [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and any(needle in file.read_bytes() for needle in needles)
    ]


@pytest.mark.parametrize("keys", [(), (KEYS["n"],)])
async def test_files_and_logs_of_a_mesh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: tuple[str, ...]
) -> None:
    caplog.set_level(logging.DEBUG, logger="meshpoint")
    forms = encoded_forms(CANARY)
    url = f"sqlite:///{tmp_path}/mesh.db"
    queues = SqliteBroker(tmp_path / "mesh.db", namespace="demo")
    await queues.open()
    await queues.declare(AgentName("ghost"))
    async with local_mesh(
        teller, broker_url=url, db_url=url, namespace="demo", encryption_keys=keys
    ) as mesh:
        await mesh.send(ghost, CANARY)  # it stays in its queue
        task = await mesh.send(teller, CANARY, user_id=CANARY, metadata={"note": CANARY})
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert update.prompt == CANARY
                break
        found = files_with(tmp_path, *forms)
        await task.complete(approval, CANARY)
        assert await task.result() == CANARY
        found += files_with(tmp_path, *forms)
    await queues.close()
    assert bool(found) is not bool(keys)
    assert CANARY not in caplog.text


@asynccontextmanager
async def open_broker(path: Path, *secrets: bytes) -> AsyncIterator[SealedBroker]:
    clear = SqliteBroker(path, namespace="demo", lease=timedelta(seconds=1))
    broker = SealedBroker(clear, mesh_ring(*secrets) if secrets else None, "demo")
    await broker.open()
    yield broker
    await broker.close()


def mesh_ring(*secrets: bytes) -> KeyRing:
    keys = [RingKey(secret) for secret in secrets]
    return KeyRing(keys, setting="mesh.encryption_keys", scope="mesh")


@pytest.mark.parametrize("known", [(), (OLD,)])
async def test_a_message_without_its_key_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(sealed_broker, "RETURN_SECONDS", 0.0)
    path, message = tmp_path / "mesh.db", replace(a_message(), body=CANARY.encode())
    async with open_broker(path, NEW) as broker:
        await broker.declare(AGENT)
        await broker.publish([(REQUESTS, message)])
    async with open_broker(path, *known) as broker:
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, Inbox())
        await until_depth(broker, dead_letter_queue(AGENT), 1)
    assert files_with(tmp_path, CANARY.encode()) == []
    clear = SqliteDeadLetters(path, namespace="demo", timeout=timedelta(seconds=10))
    letters = SealedDeadLetters(clear, mesh_ring(NEW, OLD), "demo")
    await letters.open()
    async for page in letters.read(LetterFilter()):
        (letter,) = page
        assert f"sealed with key {mesh_ring(NEW).key_id()}" in letter.reason
        assert await letters.body(letter) == CANARY.encode()
        without = SealedDeadLetters(clear, None, "demo")
        with pytest.raises(KeyMissing, match=r"mesh\.encryption_keys"):
            await without.body(letter)
        await letters.replay([letter])
    await letters.close()
    async with open_broker(path, NEW) as broker:
        await broker.declare(AGENT)
        inbox = Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        delivery = await inbox.next()
        assert delivery.message.body == CANARY.encode()
        await delivery.ack()


async def test_a_small_body_that_expands_beyond_the_limit_is_a_dead_letter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sender has the key of the mesh, but need not be honest."""
    path, bomb = tmp_path / "mesh.db", replace(a_message(), body=bytes(20_000_000))
    async with open_broker(path, NEW) as broker:
        await broker.declare(AGENT)
        await broker.publish([(REQUESTS, bomb)])
        inbox = Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        await until_depth(broker, dead_letter_queue(AGENT), 1)
        assert inbox.empty()
    assert path.stat().st_size < 1_000_000
    assert "a compressed value has 20000000 bytes; the limit is 10000000" in caplog.text


@pytest.mark.servers
async def test_copies_in_redis(redis_url: str, namespace: str) -> None:
    copy = AgentCheckpoint.model_validate(
        {"operation_id": "1", "agent": "travel", "seq": 1, "subject": CANARY, "planned": ()}
    )
    packed = PackedSnapshot(CANARY, 1, CANARY.encode(), (CANARY.encode(), b"x" * 2000))
    key = (TaskId("1"), AgentName("travel"))
    for ring in (None, a_ring(OLD), a_ring(NEW, OLD)):
        cache = RedisCheckpointCache(
            redis_url, namespace=namespace, secret=redis_data_key, sealer=ring
        )
        snapshots = RedisSnapshotStore(
            redis_url, namespace=namespace, secret=redis_data_key, sealer=ring
        )
        if ring is not None and ring.key_id() == a_ring(OLD).key_id():
            with pytest.raises(CheckpointError, match="in the clear"):
                await cache.get(*key)
            with pytest.raises(ConsistencyError, match="in the clear"):
                await snapshots.get("travel:1")
        if ring is None or ring.key_id() == a_ring(OLD).key_id():
            await cache.put(copy)
            await snapshots.put("travel:1", packed)
        assert await cache.get(*key) == copy
        assert await snapshots.get("travel:1") == packed
        assert await snapshots.digest("travel:1") == CANARY
        assert await found_in_redis(redis_url, namespace) is (ring is None)
        await cache.close()
        await snapshots.close()


async def found_in_redis(url: str, namespace: str) -> bool:
    forms = encoded_forms(CANARY)
    async with redis_client(url) as redis:
        for key in await redis.keys(f"{namespace}:*"):
            values: list[Any] = [key]
            match await redis.type(key):
                case b"string":
                    values.append(await redis.get(key))
                case b"list":
                    values += await redis.lrange(key, 0, -1)
                case b"hash":
                    values += (await redis.hgetall(key)).values()
            if any(form in value for value in values for form in forms):
                return True
    return False


def test_a_command_reseals_and_says_which_keys_are_unused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    file = tmp_path / "mesh.yaml"

    def configure(*keys: str) -> None:
        listed = ", ".join(f"'{key}'" for key in keys)
        file.write_text(
            f"mesh: {{namespace: test, broker_url: 'sqlite:///{tmp_path}/q.db', "
            f"encryption_keys: [{listed}]}}\n"
            f"agent: {{name: travel, entrypoint: 'm:a', database_url: '{url}'}}\n"
        )

    async def write() -> TaskId:
        async with open_sealed(url, a_ring(OLD)) as store:
            return (await fill(store))[0]

    task_id, old, new = asyncio.run(write()), a_ring(OLD).key_id(), a_ring(NEW).key_id()
    configure(KEYS["n"])
    missing = run_main(["db", "reseal", str(file), "--json"], capsys)
    assert (missing.code, missing.json["missing_keys"]) == (2, [old])
    configure(KEYS["n"], KEYS["o"])
    counted = run_main(["db", "reseal", str(file), "--check", "--json"], capsys)
    assert counted.json["changed_rows"] == 0
    assert set(counted.json["values_by_key"]) >= {old}
    resealed = run_main(["db", "reseal", str(file)], capsys)
    assert resealed.code == 0, resealed.err
    assert f"key {old} is no longer in use" in resealed.out
    configure(KEYS["n"])
    again = run_main(["db", "reseal", str(file), "--json"], capsys)
    assert (again.json["changed_rows"], set(again.json["values_by_key"])) == (0, {new})
    shown = run_main(["tasks", "show", task_id, "--config", str(file)], capsys)
    assert shown.code == 0, shown.err
    assert "sealed with" not in shown.out
    other = run_main(["tasks", "show", task_id, "--db", url, "--namespace", "test"], capsys)
    assert f"sealed with key {new}" in other.out + other.err
    configure("clear", KEYS["n"])
    cleared = run_main(["db", "reseal", str(file), "--clear", "--json"], capsys)
    assert (cleared.json["values_by_key"], cleared.json["unused_keys"]) == ({}, [new])
