"""A mesh that keeps a canary in each place that can hold one, and searches for it."""

from __future__ import annotations

import base64
import secrets
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import yaml

from meshpoint import (
    AgentFailed,
    Context,
    Failed,
    Peer,
    Question,
    QuestionUpdate,
    SendOptions,
    Signal,
    agent,
)
from meshpoint.conversations import ConversationKey, SqlConversations
from meshpoint.local import local_mesh
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import Address, Message, MessageType, request_queue
from meshpoint.settings import MeshSettings, load
from meshpoint.wiring import make_broker
from recorded_events import RecordedEvents

KEY = base64.b64encode(b"canary key: 32 bytes in length!!").decode()
NAMESPACE = "demo"
ghost = Peer("ghost", str, str)
echo_peer = Peer("echo", str, str)
approval = Question("approval", str)
remark = Signal("remark", str)


@agent("echo")
async def echo(ctx: Context, secret: str) -> str:
    return secret


@agent("teller", subtasks=["report"])
async def teller(ctx: Context, secret: str) -> str:
    """Keep a secret in all ways that an agent has."""
    ctx.flags["secret"] = secret
    await ctx.update_status(f"thinking of {secret}")
    await ctx.add_artifact({"artifactId": "a", "parts": [{"text": secret}]})
    await ctx.memory.set("page", secret)
    await ctx.step("note", str.strip, f" {secret} ")
    await ctx.subtask("report", strip, f"{secret} ")
    await ctx.set_value("answer", secret)
    await echo_peer(secret)
    return await ctx.wait_for(approval, prompt=secret)


def strip(text: str) -> str:
    return text.strip()


@agent("faulty", subtasks=["report"])
async def faulty(ctx: Context, secret: str) -> str:
    """Fail with the secret in the reason."""
    await echo_peer(secret)
    await ctx.subtask("report", strip, f"{secret} ")
    raise AgentFailed(f"nothing for {secret}")


@agent("caller")
async def caller(ctx: Context, secret: str) -> str:
    """Wait for an agent without replicas."""
    return await ghost(secret)


AGENTS = (echo, teller, faulty, caller)


@dataclass(frozen=True)
class CanaryMesh:
    """The servers, the keys and the canary of one run."""

    folder: Path
    database_url: str
    broker_url: str
    keys: tuple[str, ...]
    canary: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def forms(self) -> list[bytes]:
        """The canary as it is, in Base64 at each offset, and in hexadecimal digits."""
        raw = self.canary.encode()
        forms = [base64.b64encode(b"x" * offset + raw)[4:-4] for offset in range(3)]
        return [raw, *forms, raw.hex().encode()]

    def write_config(self) -> Path:
        """A configuration file for commands."""
        mesh = {
            "namespace": NAMESPACE,
            "broker_url": self.broker_url,
            "database_url": self.database_url,
            "encryption_keys": list(self.keys),
        }
        names = [each.name for each in AGENTS]
        entries = [{"name": name, "entrypoint": f"canary_mesh:{name}"} for name in names]
        path = self.folder / "mesh.yaml"
        path.write_text(yaml.safe_dump({"mesh": mesh, "agents": entries}))
        return path

    def mesh_settings(self) -> MeshSettings:
        """The settings of the mesh."""
        return load([self.write_config()]).mesh

    async def live(self) -> dict[str, str]:
        """Run tasks that wait, end and fail, and leave messages. Returns the ids of the tasks."""
        events, secret = RecordedEvents(), self.canary
        broker = make_broker(self.mesh_settings())
        await broker.open()
        try:
            await broker.declare(AgentName("ghost"))
            async with local_mesh(
                *AGENTS,
                broker_url=self.broker_url,
                db_url=self.database_url,
                namespace=NAMESPACE,
                observer=events,
                encryption_keys=self.keys,
                keep_security_context=True,
                checkpoint_archive=True,
                history=True,
                **self.options,
            ) as mesh:
                await mesh.send(ghost, secret)  # it stays in its queue
                about: SendOptions = {
                    "user_id": secret,
                    "session_id": secret,
                    "metadata": {"note": secret},
                }
                waiting = await mesh.send(teller, secret, **about)
                ended = await mesh.send(teller, secret, **about)
                failed = await mesh.send(faulty, secret, **about)
                called = await mesh.send(caller, secret, **about)
                for task in (waiting, ended):
                    async for update in task.updates():
                        if isinstance(update, QuestionUpdate):
                            assert update.prompt == secret
                            break
                    await task.signal(remark, secret)
                await ended.complete(approval, secret)
                assert await ended.result() == secret
                assert isinstance(await failed.outcome(), Failed)
                await events.wait(Step.CHECKPOINT, Phase.AFTER, task_id=called.id)
                letters = _unreadable(secret)
                await broker.publish([(request_queue(AgentName("teller")), m) for m in letters])
                await events.wait(Step.DEAD_LETTER, Phase.INFO, count=len(letters))
                found = {
                    "waiting": waiting.id,
                    "ended": ended.id,
                    "failed": failed.id,
                    "called": called.id,
                }
        finally:
            await broker.close()
        await self._converse()
        return found

    async def _converse(self) -> None:
        conversations = SqlConversations(self.database_url, encryption_keys=self.keys)
        key = ConversationKey("teller", "client", None, self.canary, self.canary)
        await conversations.append(key, new_id(), "library", [{"text": self.canary}])
        (turn,) = await conversations.load(key)
        assert turn.messages == [{"text": self.canary}]


def _unreadable(secret: str) -> list[Message]:
    """Requests that die for five causes."""
    quoted = f'"{secret}"'
    bodies = [
        secret,
        quoted,
        f'{{"{secret}": 1}}',
        f'{{"message": {{"parts": [{{"text": {quoted}}}]}}}}',
        f'{{"message": {quoted}, "metadata": {{"userId": [{quoted}]}}}}',
    ]
    return [
        Message(
            type=MessageType.REQUEST,
            body=body.encode(),
            message_id=(id_ := new_id()),
            correlation_id=id_,
            app_id="client",
            reply_to=Address("client.private.none"),
        )
        for body in bodies
    ]


def new_canary() -> str:
    """A word that occurs nowhere else."""
    return f"canary{secrets.token_hex(9)}"


def files_with(folder: Path, forms: Iterable[bytes]) -> list[str]:
    """The files below a folder in which a form is found."""
    forms = list(forms)
    return [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.is_symlink()
        if any(form in file.read_bytes() for form in forms)
    ]


async def columns_with(url: str, forms: Iterable[bytes]) -> set[str]:
    """The columns of all tables of a database in which a form is found."""
    forms = list(forms)
    if url.startswith("sqlite"):
        return _sqlite_columns_with(url.removeprefix("sqlite:///"), forms)
    connection = await asyncpg.connect(url)
    try:
        columns = await connection.fetch(
            "SELECT table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_schema = 'public'"
        )
        found: set[str] = set()
        for table, column, kind in columns:
            shown = f'"{column}"' if kind == "bytea" else f'"{column}"::text'
            rows = await connection.fetch(f'SELECT {shown} AS value FROM "{table}"')
            if any(_has(row["value"], forms) for row in rows):
                found.add(f"{table}.{column}")
        return found
    finally:
        await connection.close()


def _sqlite_columns_with(path: str, forms: list[bytes]) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        found: set[str] = set()
        for (table,) in tables:
            cursor = db.execute(f'SELECT * FROM "{table}"')
            names = [each[0] for each in cursor.description]
            for row in cursor:
                found |= {
                    f"{table}.{name}"
                    for name, value in zip(names, row, strict=True)
                    if _has(value, forms)
                }
        return found


def _has(value: object, forms: list[bytes]) -> bool:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return any(form in raw for form in forms)
