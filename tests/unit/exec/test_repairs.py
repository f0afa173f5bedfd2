"""Repairs of a flow by a person or a program: dry runs, checkpoints in pipes, kept versions."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from code_blocks import code_blocks
from command_result import Command, CommandResult
from meshpoint.exec.locks import FileLock

from .flows import MODULE, read_effects, write_flow

FLOW = """
from functools import partial
from pathlib import Path

from meshpoint import StatefulAgent, agent

RATE = 2
RATING = "rate"


@agent("flow", version="1", subtasks=["fetch", "convert", "rate"])
async def flow(ctx, n: int) -> int:
    page = await ctx.subtask("fetch", fetch, n)
    converted = await ctx.subtask("convert", partial(convert, page))
    return await ctx.subtask(RATING, rate, converted)


async def fetch(n: int) -> int:
    ran("fetch")
    return n + 1


async def convert(page: int) -> int:
    ran("convert")
    return double(page)


def double(page: int) -> int:
    return page * RATE


async def rate(page: int) -> int:
    ran("rate")
    raise RuntimeError("no rate today")


def ran(step):
    with Path("effects").open("a") as file:
        file.write(step + "\\n")


@agent("pages", version="1")
async def pages(ctx, count: int) -> None:
    for number in range(count):
        await ctx.subtask(f"page {number}", fetch, number)
    await ctx.subtask("last", rate, count)


class Keeper(StatefulAgent[int, None, int]):
    name = "keeper"
    factor = 1

    async def on_request(self, ctx, n: int):
        kept = await ctx.subtask("keep", self.keep, n)
        await ctx.subtask("local", lambda: kept)
        raise RuntimeError("not today")

    async def keep(self, n: int) -> int:
        return n * self.factor
"""
REPAIRED = FLOW.replace('raise RuntimeError("no rate today")', "return page")


def edit(folder: Path, old: str = "", new: str = "", source: str = REPAIRED) -> None:
    assert old in source
    write_flow(folder, source.replace(old, new) if old else source)


def forecast(result: CommandResult) -> list[tuple[str, str, str | None]]:
    return [(step["name"], step["action"], step["why"]) for step in result.json["steps"]]


NEW = [
    ("fetch", "run", "it has no result"),
    ("convert", "run", "it has no result"),
    ("rate", "run", "it has no result"),
]
DOUBT = "unless an argument differs: the flow has changed"


def snapshot(folder: Path) -> dict[str, bytes | list[str]]:
    """All files; of a database its rows, as SQLite moves pages from its journal at any time."""
    return {
        str(file.relative_to(folder)): rows(file) if file.suffix == ".db" else file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and not file.name.endswith(("-wal", "-shm"))
    }


def rows(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as db:
        return list(db.iterdump())


def test_a_dry_run_of_a_new_session_runs_and_writes_nothing(flow: Command, folder: Path) -> None:
    dry = flow("--input", "3", "--dry-run")
    assert (dry.code, forecast(dry)) == (0, NEW)
    assert (dry.json["session"], dry.json["attempt"]) == (None, 1)
    assert {file.name for file in folder.iterdir()} == {"tested_flow.py"}


@pytest.mark.parametrize("agent", ["flow", "Keeper"])
def test_a_dry_run_finds_an_input_that_does_not_fit(
    flow: Command, cli: Command, folder: Path, agent: str
) -> None:
    dry = flow("--input", '"three"', "--dry-run", agent=agent)
    assert (dry.code, dry.json["refusal"]) == (4, flow_refusal(agent))
    shown = cli("exec", f"{MODULE}:{agent}", "--input", '"three"', "--dry-run")
    assert (shown.code, shown.out) == (4, "")
    assert shown.err == f"error: it would fail at once: {flow_refusal(agent)}\n"
    assert {file.name for file in folder.iterdir()} == {"tested_flow.py"}
    assert flow("--input", "3", "--dry-run", agent=agent).json["refusal"] is None


def flow_refusal(agent: str) -> str:
    return (
        f"input of {agent.lower()}: int: Input should be a valid integer, "
        "unable to parse string as an integer"
    )


def test_a_dry_run_checks_the_input_of_its_session(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--session", "one")
    edit(folder, "n: int) -> int:\n    page", "n: str) -> int:\n    page")
    assert flow("--session", "one", "--dry-run").code == 4
    fitting = flow("--session", "one", "--input", '"3"', "--dry-run")
    assert (fitting.code, fitting.json["refusal"]) == (0, None)
    assert flow("--session", "one", "--input", "3", "--dry-run").code == 4


def test_a_dry_run_tells_what_a_resume_would_do(flow: Command, folder: Path) -> None:
    session = flow("--input", "3").json["session"]
    before = snapshot(folder)
    unchanged = flow("--input", "3", "--resume", "--dry-run")
    assert unchanged.code == 0
    assert forecast(unchanged) == [
        ("fetch", "reuse", None),
        ("convert", "reuse", None),
        ("rate", "run", "it failed"),
    ]
    assert (unchanged.json["session"], unchanged.json["attempt"]) == (session, 2)
    assert (unchanged.json["certain"], unchanged.json["flow_changed"]) == (True, False)
    assert snapshot(folder) == before
    edit(folder)
    repaired = flow("--input", "3", "--resume", "--dry-run")
    assert (repaired.code, repaired.json["certain"]) == (0, False)
    assert forecast(repaired)[:2] == [("fetch", "reuse", DOUBT), ("convert", "reuse", DOUBT)]
    done = flow("--input", "3", "--resume")
    assert [status for _, status, _ in done.steps] == ["reused", "reused", "completed"]


CHANGES = {
    "its code": ("return n + 1", "return n + 2", "fetch", "its function has changed"),
    "a helper": ("return page * RATE", "return page + RATE", "convert", "'double', which it uses"),
    "a constant": ("RATE = 2", "RATE = 3", "convert", "'RATE', which it uses, has changed"),
}


@pytest.mark.parametrize(("old", "new", "step", "why"), CHANGES.values(), ids=CHANGES)
def test_a_dry_run_predicts_steps_that_run_again(
    flow: Command, folder: Path, old: str, new: str, step: str, why: str
) -> None:
    flow("--input", "3")
    edit(folder, old, new)
    dry = flow("--input", "3", "--resume", "--dry-run")
    assert (dry.code, dry.json["repeats_steps"]) == (9, True)
    predicted = {name: (action, reason) for name, action, reason in forecast(dry)}
    assert predicted[step][0] == "run"
    assert why in str(predicted[step][1])
    if step == "fetch":
        assert predicted["convert"] == ("run", "after 'fetch', which runs again")
    done = flow("--input", "3", "--resume")
    for name, status, reason in done.steps[:2]:
        assert (status == "reused") == (predicted[name][0] == "reuse")
        assert status == "reused" or reason == predicted[name][1]


def test_a_dry_run_is_readable_on_a_terminal(cli: Command, folder: Path) -> None:
    cli("exec", "tested_flow:flow", "--input", "3", "--session", "rome")
    edit(folder, "return n + 1", "return n + 2")
    dry = cli("exec", "tested_flow:flow", "--session", "rome", "--dry-run")
    assert dry.code == 9
    lines = [line.split()[:2] for line in dry.out.splitlines()]
    assert [line for line in lines if line[1:] == ["run"]] == [
        ["fetch", "run"],
        ["convert", "run"],
        ["rate", "run"],
    ]
    assert dry.err == "dry run of attempt 2 in session rome: nothing ran\n"


def test_another_input_makes_a_dry_run_uncertain(flow: Command) -> None:
    flow("--input", "3", "--session", "rome")
    dry = flow("--input", "4", "--session", "rome", "--dry-run")
    assert (dry.json["certain"], dry.json["input_changed"]) == (False, True)
    doubt = "unless an argument differs: the input has changed"
    assert forecast(dry)[0] == ("fetch", "reuse", doubt)


def test_a_dry_run_follows_the_rules_of_sessions(flow: Command, folder: Path) -> None:
    assert flow("--input", "3", "--resume", "--dry-run").code == 10
    assert flow("--session", "rome", "--dry-run").code == 2
    edit(folder)
    flow("--input", "3", "--session", "rome")
    assert flow("--input", "3", "--resume", "--dry-run").code == 12
    restarted = flow("--session", "rome", "--dry-run")
    assert (restarted.code, forecast(restarted)) == (0, NEW)
    other = flow("--session", "rome", "--dry-run", agent="pages")
    assert (other.code, "belongs to" in other.err) == (2, True)
    lock = FileLock.try_acquire(folder / ".meshpoint/sessions/rome.lock")
    assert lock is not None
    assert flow("--session", "rome", "--dry-run").code == 7
    lock.release()
    assert flow("--input", "3", "--dry-run", "--export", "kept.json").code == 2


def test_a_dry_run_finds_an_operation_that_completed_unrecorded(
    flow: Command, folder: Path
) -> None:
    edit(folder)
    flow("--input", "3", "--session", "rome")
    file = folder / ".meshpoint/sessions/rome.json"
    session = json.loads(file.read_text())
    session["attempts"][0] |= {"ended": None, "ending": None, "steps": []}
    file.write_text(json.dumps(session))
    dry = flow("--session", "rome", "--dry-run")
    assert forecast(dry)[0] == ("fetch", "reuse", "the operation has already completed")


def test_a_dry_run_knows_names_made_in_a_loop(flow: Command, folder: Path) -> None:
    flow("--input", "2", agent="pages")
    edit(folder, "return n + 1", "return n + 2")
    dry = flow("--input", "2", "--resume", "--dry-run", agent="pages")
    assert forecast(dry) == [
        ("page 0", "run", "its function has changed"),
        ("page 1", "run", "after 'page 0', which runs again"),
        ("last", "run", "after 'page 0', which runs again"),
    ]


def test_a_dry_run_admits_what_it_cannot_know(flow: Command, folder: Path) -> None:
    flow("--input", "2", agent="Keeper")
    edit(folder, 'RuntimeError("not today")', 'RuntimeError("never")', FLOW)
    dry = flow("--input", "2", "--resume", "--dry-run", agent="Keeper")
    unknown = "unless its function has changed, which is unknown before it runs"
    assert forecast(dry) == [("keep", "reuse", DOUBT), ("local", "reuse", unknown)]
    edit(folder, "factor = 1", "factor = 2", FLOW)
    dry = flow("--input", "2", "--resume", "--dry-run", agent="Keeper")
    assert forecast(dry)[0] == ("keep", "run", "'Keeper.factor', which it uses, has changed")


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


SOURCES: dict[str, Callable[[Any], str]] = {
    "a checkpoint": lambda result: json.dumps(result["checkpoint"]),
    "the result of an attempt": json.dumps,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("way", ["inline", "standard input", "file"])
def test_a_checkpoint_is_accepted_from_everywhere(
    flow: Command,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Callable[[Any], str],
    way: str,
) -> None:
    text = source(flow("--input", "3", "--include-outputs").json)
    (folder / "kept.json").write_text(text)
    pipe(monkeypatch, text)
    given = {"inline": text, "standard input": "-", "file": "kept.json"}[way]
    edit(folder)
    dry = flow("--input", "3", "--resume-from", given, "--home", "elsewhere", "--dry-run")
    assert [step[1] for step in forecast(dry)] == ["reuse", "reuse", "run"]
    assert not (folder / "elsewhere").exists()
    pipe(monkeypatch, text)
    done = flow("--input", "3", "--resume-from", given, "--home", "elsewhere")
    assert [status for _, status, _ in done.steps] == ["reused", "reused", "completed"]
    assert read_effects(folder) == ["fetch", "convert", "rate", "rate"]


@pytest.mark.parametrize(
    ("given", "text", "problem"),
    [
        ("-", "", "standard input is not JSON"),
        ("-", "[]", "standard input is not a checkpoint"),
        ("{", "", "the given JSON is not JSON, or truncated"),
        ('{"checkpoint": null}', "", "the result of an attempt without a checkpoint"),
        ('{"a": 1}', "", "the given JSON is not a checkpoint"),
    ],
)
def test_an_invalid_checkpoint_is_refused_in_one_line(
    flow: Command,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    text: str,
    problem: str,
) -> None:
    pipe(monkeypatch, text)
    refused = flow("--input", "3", "--resume-from", given)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert problem in refused.err
    assert not list(folder.glob(".meshpoint/sessions/*.json"))


def test_a_dry_run_of_an_import_names_missing_outputs(flow: Command, folder: Path) -> None:
    text = json.dumps(flow("--input", "3").json["checkpoint"])
    dry = flow("--input", "3", "--resume-from", text, "--home", "elsewhere", "--dry-run")
    assert forecast(dry) == [
        ("fetch", "run", "its output is not in the file"),
        ("convert", "run", "after 'fetch', which runs again"),
        ("rate", "run", "it has no result"),
    ]
    here = flow("--input", "3", "--resume-from", text, "--dry-run")
    assert [step[1] for step in forecast(here)] == ["reuse", "reuse", "run"]
    assert here.json["certain"]
    other = flow("--input", "4", "--resume-from", text, "--dry-run")
    assert other.json["input_changed"]


def test_a_session_keeps_each_version_of_its_flow(
    flow: Command, cli: Command, folder: Path
) -> None:
    flow("--input", "3", "--session", "rome")
    flow("--session", "rome")
    edit(folder)
    flow("--session", "rome")
    attempts = cli("sessions", "show", "rome", "--json").json["attempts"]
    assert [attempt["flow"] for attempt in attempts] == [1, 1, 2]
    assert "v2" in cli("sessions", "show", "rome").out
    kept = folder / ".meshpoint/sessions/rome"
    assert (kept / "v1/tested_flow.py").read_text() == FLOW
    assert (kept / "v2/tested_flow.py").read_text() == REPAIRED
    assert cli("sessions", "flow", "rome", "1", "--json").json["files"] == {"tested_flow.py": FLOW}
    last = cli("sessions", "flow", "rome")
    assert last.out == f"# tested_flow.py\n{REPAIRED.rstrip()}\n"
    changes = cli("sessions", "flow", "rome", "--diff", "1").out.splitlines()
    assert changes[:2] == ["--- v1/tested_flow.py", "+++ v2/tested_flow.py"]
    assert [line for line in changes[2:] if line[:1] in {"-", "+"}] == [
        '-    raise RuntimeError("no rate today")',
        "+    return page",
    ]
    missing = cli("sessions", "flow", "rome", "7")
    assert (missing.code, "it has v1, v2" in missing.err) == (10, True)
    cli("sessions", "rm", "rome")
    assert not kept.exists()


def test_a_session_goes_back_to_an_earlier_version_of_its_flow(
    flow: Command, cli: Command, folder: Path
) -> None:
    flow("--input", "3", "--session", "rome")
    edit(folder, "return n + 1", "return n + 2", FLOW)
    flow("--session", "rome")
    back = cli("sessions", "restore", "rome", "1", "--json")
    assert back.json == {"session": "rome", "version": 1, "changed": [f"{MODULE}.py"]}
    assert (folder / f"{MODULE}.py").read_text() == FLOW
    assert cli("sessions", "restore", "rome", "1").out == "no file differs\n"
    again = flow("--session", "rome")
    assert again.steps[0] == ("fetch", "completed", "its function has changed")
    attempts = cli("sessions", "show", "rome", "--json").json["attempts"]
    assert [attempt["flow"] for attempt in attempts] == [1, 2, 1]
    assert cli("sessions", "flow", "rome", "--json").json["version"] == 1
    assert cli("sessions", "restore", "rome", "3").code == 10


def test_a_restore_keeps_changes_that_no_version_has(
    flow: Command, cli: Command, folder: Path
) -> None:
    flow("--input", "3", "--session", "rome")
    edit(folder)
    refused = cli("sessions", "restore", "rome", "1")
    assert (refused.code, "that no version of the session has" in refused.err) == (2, True)
    assert (folder / f"{MODULE}.py").read_text() == REPAIRED
    cli("sessions", "restore", "rome", "1", "--into", "new/folder")
    assert (folder / f"new/folder/{MODULE}.py").read_text() == FLOW
    blocked = cli("sessions", "restore", "rome", "1", "--into", f"{MODULE}.py")
    assert (blocked.code, blocked.err.count("\n")) == (2, 1)


def test_the_commands_of_the_source_document_have_counterparts(folder: Path) -> None:
    """The page shows them in order; of all steps, only new sessions run the first ones."""
    root = Path(__file__).parents[3]
    page = root / "docs/explanation/from-the-source-documents.md"
    (shown,) = code_blocks(page.read_text(encoding="utf-8"), "sh")
    (folder / "jq").write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "print(json.dumps(json.load(open(sys.argv[2]))[sys.argv[1][1:]]))\n"
    )
    (folder / "jq").chmod(0o755)
    write_flow(folder, FLOW)
    (folder / f"{MODULE}.py").rename(folder / "flow.py")
    paths = (folder, Path(sys.executable).parent, os.environ["PATH"])
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, paths))}
    codes = [
        subprocess.run(["sh", "-c", line], env=environment, check=False).returncode
        for line in shown.splitlines()
        if not line.startswith("#")
    ]
    assert codes == [4, 0, 0, 4, 4, 4, 4, 4]
    assert read_effects(folder) == [
        *("fetch", "convert", "rate"),  # the first run
        *["rate"] * 3,  # resumed, in three ways
        *("fetch", "convert", "rate", "rate"),  # the session
    ]


def test_the_versions_of_peers_are_kept_too(flow: Command, folder: Path) -> None:
    (folder / "other_flow.py").write_text(FLOW.replace('"pages"', '"others"'))
    flow("--input", "3", "--session", "rome", "--with", "other_flow:pages")
    kept = folder / ".meshpoint/sessions/rome/v1"
    assert sorted(file.name for file in kept.iterdir()) == ["other_flow.py", "tested_flow.py"]
    sys.modules.pop("other_flow")


MIGRATION = """
from meshpoint import migrates


@migrates("1", "2")
def migrate(checkpoint):
    if "subtask_progress" not in checkpoint:
        checkpoint["subtask_progress"] = {
            task: 1.0 for task in checkpoint["completed_subtasks"]
        }
    return checkpoint


@agent("flow", version="2", migrations=[migrate], """


def test_a_key_that_a_migration_adds_is_kept(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--session", "rome")
    edit(folder, '@agent("flow", version="1", ', MIGRATION, FLOW)
    for _ in range(2):
        failed = flow("--session", "rome")
        assert [status for _, status, _ in failed.steps] == ["reused", "reused", "failed"]
    with sqlite3.connect(folder / ".meshpoint/exec.db") as db:
        (memory,) = db.execute(
            "SELECT working_memory FROM agent_checkpoints ORDER BY seq DESC LIMIT 1"
        ).fetchone()
    db.close()
    extra = json.loads(json.loads(memory)["extra"])
    assert extra == {"subtask_progress": {"fetch": 1.0, "convert": 1.0}}
