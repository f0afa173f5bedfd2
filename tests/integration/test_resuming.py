"""Operations by an operator: through the API and the command line, on both databases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from meshpoint import (
    NoCheckpoint,
    OperationCompleted,
    OperationConflict,
    OperationNotFound,
    OperationRunning,
    ResumeRefused,
)
from meshpoint.adapters.sql import SqlStore
from meshpoint.cli import main
from meshpoint.cli.exits import ExitCode
from meshpoint.errors import ConfigurationError
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState
from meshpoint.operations import Operations
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import an_end, begun, failed, operating, saved

Prepare = Callable[[CheckpointStore], Awaitable[TaskId]]
NAMESPACE = "test"


def run_on_store(url: str, step: Callable[[CheckpointStore], Awaitable[TaskId]]) -> TaskId:
    """Run `step` on an open store and return its result."""

    async def done() -> TaskId:
        store = SqlStore(url, namespace=NAMESPACE, tombstone_ttl=timedelta(hours=1))
        await store.open()
        try:
            return await step(store)
        finally:
            await store.close()

    return asyncio.run(done())


def resume_and_report(url: str, id_: str) -> ResumeRefused | None:
    """The API's refusal to resume, or None."""

    async def resume() -> ResumeRefused | None:
        async with Operations(url, namespace=NAMESPACE) as operations:
            try:
                await operations.resume(id_)
            except ResumeRefused as error:
                return error
        return None

    return asyncio.run(resume())


@pytest.fixture
def command(
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_error:
            main([*arguments, "--db", database_url, "--namespace", NAMESPACE])
        printed = capsys.readouterr()
        return int(exit_error.value.code or 0), printed.out, printed.err

    return run


async def create_nothing(store: CheckpointStore) -> TaskId:
    return TaskId(new_id())


async def create_running(store: CheckpointStore) -> TaskId:
    run = await operating(store)
    await saved(store, run)
    return run.task_id


async def create_completed(store: CheckpointStore) -> TaskId:
    run = await operating(store)
    await saved(store, run)
    await store.end([an_end(run, TaskState.COMPLETED)])
    return run.task_id


async def create_failed_before_subtask(store: CheckpointStore) -> TaskId:
    run = await begun(store)
    await store.end([an_end(run, TaskState.FAILED)])
    return run.task_id


async def create_failed_with_active_task(store: CheckpointStore) -> TaskId:
    run = await failed(store, exclusive=True)
    await operating(store)
    return run.task_id


REFUSALS: dict[str, tuple[Prepare, type[ResumeRefused], ExitCode, str]] = {
    "not found": (create_nothing, OperationNotFound, ExitCode.NOT_FOUND, "there is no operation"),
    "running": (
        create_running,
        OperationRunning,
        ExitCode.RUNNING,
        "is active: running, owned by",
    ),
    "completed": (create_completed, OperationCompleted, ExitCode.COMPLETED, "has completed"),
    "no checkpoint": (
        create_failed_before_subtask,
        NoCheckpoint,
        ExitCode.NO_CHECKPOINT,
        "no checkpoint to resume from",
    ),
    "another active": (
        create_failed_with_active_task,
        OperationConflict,
        ExitCode.OTHER_ACTIVE,
        "its agent is exclusive",
    ),
}


@pytest.mark.parametrize(("prepare", "error", "code", "said"), REFUSALS.values(), ids=REFUSALS)
def test_a_resume_is_refused_by_api_and_command(
    database_url: str,
    command: Callable[..., tuple[int, str, str]],
    prepare: Prepare,
    error: type[ResumeRefused],
    code: ExitCode,
    said: str,
) -> None:
    id_ = run_on_store(database_url, prepare)
    refused = resume_and_report(database_url, id_)
    assert type(refused) is error
    assert said in str(refused)
    exit_code, out, err = command("tasks", "resume", id_)
    assert (exit_code, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("error: ")
    assert said in err


def test_the_second_of_two_resumes_is_refused_as_running(
    database_url: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    async def create_failed(store: CheckpointStore) -> TaskId:
        return (await failed(store)).task_id

    id_ = run_on_store(database_url, create_failed)
    code, out, _ = command("tasks", "resume", id_, "--json")
    expected = {"task_id": id_, "agent": "travel", "status": "resumed", "retry_count": 1}
    assert (code, json.loads(out)) == (0, expected)
    assert command("tasks", "resume", id_)[0] == ExitCode.RUNNING


@pytest.mark.parametrize("id_", ["", "x" * 300, "a\nb", "a\0b"])
def test_an_invalid_operation_id_is_refused(
    database_url: str, command: Callable[..., tuple[int, str, str]], id_: str
) -> None:
    async def ask() -> None:
        async with Operations(database_url, namespace=NAMESPACE) as operations:
            await operations.resume(id_)

    run_on_store(database_url, create_nothing)
    with pytest.raises(ConfigurationError, match="operation id"):
        asyncio.run(ask())
    code, _, err = command("tasks", "resume", id_)
    assert (code, err.count("\n")) == (ExitCode.CONFIGURATION, 1)


def test_operations_are_listed_shown_and_preserved(
    database_url: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    async def create_running_and_failed(store: CheckpointStore) -> TaskId:
        await operating(store)
        return (await failed(store)).task_id

    id_ = run_on_store(database_url, create_running_and_failed)
    code, out, _ = command("checkpoints", "list", "--status", "failed")
    assert code == 0
    assert id_ in out
    assert command("checkpoints", "list", "--status", "lost")[0] == ExitCode.CONFIGURATION
    _, out, _ = command("checkpoints", "list", "--json")
    assert {item["status"] for item in json.loads(out)} == {"running", "failed"}
    _, out, _ = command("checkpoints", "show", id_)
    assert "no answer" in out
    _, out, _ = command("checkpoints", "show", id_, "--json")
    shown = json.loads(out)
    assert (shown["id"], shown["preserve"], len(shown["checkpoints"])) == (id_, False, 2)
    assert command("checkpoints", "preserve", id_)[0] == 0
    assert json.loads(command("checkpoints", "show", id_, "--json")[1])["preserve"] is True
    assert command("checkpoints", "preserve", id_, "--no", "--json")[0] == 0
    assert command("checkpoints", "preserve", new_id())[0] == ExitCode.NOT_FOUND
    assert command("checkpoints", "show", new_id())[0] == ExitCode.NOT_FOUND


def test_an_export_is_a_file_of_its_owner_and_follows_no_link(
    database_url: str, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    async def create_failed(store: CheckpointStore) -> TaskId:
        return (await failed(store)).task_id

    id_ = run_on_store(database_url, create_failed)
    (tmp_path / "target").write_text("kept")
    (tmp_path / "kept.json").symlink_to(tmp_path / "target")
    assert command("checkpoints", "export", id_, "-o", "kept.json")[0] == 0
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "kept.json").is_symlink()
    assert oct((tmp_path / "kept.json").stat().st_mode & 0o777) == "0o600"


def test_a_caller_can_wait_for_the_outcome_of_an_operation(database_url: str) -> None:
    async def wait() -> None:
        store = SqlStore(database_url, namespace=NAMESPACE)
        await store.open()
        run = await operating(store)
        async with Operations(database_url, namespace=NAMESPACE) as operations:
            waiting = asyncio.create_task(operations.wait(run.task_id))
            await operations.get(run.task_id)
            await store.end(
                [
                    an_end(
                        run, TaskState.COMPLETED, reply=encode_reply(run.task_id, None, Ok("done"))
                    )
                ]
            )
            assert await waiting == Ok("done")
            with pytest.raises(OperationNotFound):
                await operations.wait(new_id())
        await store.close()

    asyncio.run(wait())
