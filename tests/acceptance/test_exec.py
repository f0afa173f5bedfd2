"""`meshpoint exec` for real: processes are killed, raced and interrupted; files change between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_result import Command, CommandResult

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
EXEC = [sys.executable, "-m", "meshpoint.cli", "exec"]
TRIALS = int(os.environ.get("MESHPOINT_TRIALS", "20"))

FLOW_CODE = """
from pathlib import Path

from meshpoint import agent


@agent("flow", subtasks=["fetch", "parse", "rate"])
async def flow(ctx, n: int) -> int:
    page = await ctx.subtask("fetch", fetch, n)
    numbers = await ctx.subtask("parse", parse, page)
    return await ctx.subtask("rate", rate, numbers)


async def fetch(n: int) -> int:
    ran("fetch")
    return n + 1


async def parse(page: int) -> list[int]:
    ran("parse")
    return [page, page]


async def rate(numbers: list[int]) -> int:
    ran("rate")
    raise RuntimeError("no rate today")


def ran(step):
    with Path("effects").open("a") as file:
        file.write(step + "\\n")
"""
REPAIRED_CODE = FLOW_CODE.replace('raise RuntimeError("no rate today")', "return sum(numbers)")
HANGING_CODE = "import asyncio\n" + FLOW_CODE.replace(
    'ran("parse")\n',
    'ran("parse")\n    print("parse hangs", flush=True)\n    await asyncio.Event().wait()\n',
)

CALLER_CODE = """
import asyncio
from pathlib import Path

from meshpoint import Peer, agent

ask = Peer("answerer", int, int)


@agent("caller", subtasks=["question", "answer"])
async def caller(ctx, n: int) -> int:
    question = await ctx.subtask("question", double, n)
    return await ctx.subtask("answer", asked, ctx, question)


def double(n: int) -> int:
    ran("question")
    return 2 * n


async def asked(ctx, question: int) -> int:
    return await ask(question)


@agent("answerer")
async def answerer(ctx, question: int) -> int:
    found = await ctx.subtask("search", search, question)
    if not Path("open").exists():
        print("the answerer waits", flush=True)
        await asyncio.Event().wait()
    return found


def search(question: int) -> int:
    ran("search")
    return question + 1


def ran(step):
    with Path("effects").open("a") as file:
        file.write(step + "\\n")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flow.py").write_text(FLOW_CODE)
    return tmp_path


@pytest.fixture
def execute(folder: Path) -> Command:
    def run(*arguments: str, agent: str = "flow:flow") -> CommandResult:
        command = [*EXEC, agent, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    return run


def start_exec(
    folder: Path, *arguments: str, marker: str, agent: str = "flow:flow"
) -> subprocess.Popen[str]:
    """Start `meshpoint exec` and wait until it writes a line with `marker` to standard error."""
    process = subprocess.Popen(
        [*EXEC, agent, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if marker in line:
            return process
    raise AssertionError(f"exec ended with {process.wait()} before it wrote {marker!r}")


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def recorded_effects(folder: Path) -> list[str]:
    return (folder / "effects").read_text().split()


def test_a_flow_is_repaired_step_by_step(folder: Path, execute: Command) -> None:
    failed = execute("--input", "3", "--json")
    assert failed.code == 4
    assert failed.steps == [
        ("fetch", "completed", None),
        ("parse", "completed", None),
        ("rate", "failed", "RuntimeError: no rate today"),
    ]
    report = failed.json
    assert report | {
        "steps": None,
        "checkpoint": None,
        "session": None,
        "operation_id": None,
        "resume": None,
    } == {
        "success": False,
        "session": None,
        "attempt": 1,
        "operation_id": None,
        "agent": "flow",
        "status": "failed",
        "steps": None,
        "output": None,
        "error": {"kind": "error", "message": "RuntimeError: no rate today"},
        "checkpoint": None,
        "resume": None,
    }
    assert report["resume"] == f"meshpoint exec flow:flow --session {report['session']}"
    assert [each["name"] for each in report["checkpoint"]["subtasks"]] == [
        "fetch",
        "parse",
        "rate",
    ]
    assert "output" not in report["checkpoint"]["subtasks"][0]

    (folder / "flow.py").write_text(REPAIRED_CODE)
    repaired = execute("--input", " 3 ", "--resume", "--json")
    assert (repaired.code, repaired.json["output"], repaired.json["attempt"]) == (0, 8, 2)
    assert repaired.steps == [
        ("fetch", "reused", None),
        ("parse", "reused", None),
        ("rate", "completed", None),
    ]
    assert (repaired.json["session"], repaired.json["operation_id"]) == (
        report["session"],
        report["operation_id"],
    )
    assert (repaired.json["checkpoint"], repaired.json["resume"]) == (None, None)
    assert recorded_effects(folder) == ["fetch", "parse", "rate", "rate"]

    second_run = execute("--input", "3", "--resume")
    assert (second_run.code, second_run.out) == (12, "")
    assert second_run.err.count("\n") == 1
    assert report["session"] in second_run.err


def test_a_changed_first_step_reruns_all_later_steps(folder: Path, execute: Command) -> None:
    assert execute("--input", "3").code == 4
    (folder / "flow.py").write_text(REPAIRED_CODE.replace("return n + 1", "return n + 2"))
    resumed = execute("--input", "3", "--resume", "--json")
    assert (resumed.code, resumed.json["output"]) == (0, 10)
    assert resumed.steps == [
        ("fetch", "completed", "its function has changed"),
        ("parse", "completed", "after 'fetch', which runs again"),
        ("rate", "completed", None),
    ]
    assert recorded_effects(folder) == ["fetch", "parse", "rate"] * 2


def test_a_killed_attempt_can_be_resumed(folder: Path, execute: Command) -> None:
    (folder / "flow.py").write_text(HANGING_CODE)
    kill(start_exec(folder, "--input", "3", "--session", "mine", marker="parse hangs"))
    (folder / "flow.py").write_text(REPAIRED_CODE)
    done = execute("--session", "mine", "--json")  # the session has recorded its input
    assert (done.code, done.json["output"], done.json["attempt"]) == (0, 8, 2)
    assert [status for _, status, _ in done.steps] == ["reused", "completed", "completed"]
    assert recorded_effects(folder) == ["fetch", "parse", "parse", "rate"]
    shown = subprocess.run(
        [*EXEC[:-1], "sessions", "show", "mine", "--json"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    assert [each["ending"] for each in json.loads(shown.stdout)["attempts"]] == [
        "killed",
        "completed",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 5)])
def test_a_signal_cancels_the_run_and_keeps_its_checkpoint(
    folder: Path, number: signal.Signals, code: int
) -> None:
    (folder / "flow.py").write_text(HANGING_CODE)
    export = ("--export", "kept.json", "--include-outputs")
    process = start_exec(
        folder, "--input", "3", "--session", "mine", *export, marker="parse hangs"
    )
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == code
    assert "resume with: meshpoint exec flow:flow --session mine" in stderr
    exported = json.loads((folder / "kept.json").read_text())
    assert [(each["name"], each.get("output")) for each in exported["subtasks"]][:1] == [
        ("fetch", 4)
    ]
    session = json.loads((folder / ".meshpoint/sessions/mine.json").read_text())
    assert [attempt["ending"] for attempt in session["attempts"]] == ["cancelled"]


def test_a_second_signal_ends_code_that_ignores_the_first(folder: Path, execute: Command) -> None:
    (folder / "flow.py").write_text(
        "import threading\n" + HANGING_CODE.replace("await asyncio.Event", "threading.Event")
    )
    process = start_exec(folder, "--input", "3", "--session", "mine", marker="parse hangs")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "cancelling; a second signal ends it at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    (folder / "flow.py").write_text(REPAIRED_CODE)
    done = execute("--session", "mine", "--json")
    assert (done.code, [status for _, status, _ in done.steps]) == (
        0,
        ["reused", "completed", "completed"],
    )


def test_a_killed_peer_is_resumed_too(folder: Path, execute: Command) -> None:
    (folder / "calls.py").write_text(CALLER_CODE)
    arguments = ("--with", "calls:answerer", "--input", "5", "--session", "mine")
    kill(start_exec(folder, *arguments, marker="the answerer waits", agent="calls:caller"))
    (folder / "open").touch()
    done = execute(*arguments, "--json", agent="calls:caller")
    assert (done.code, done.json["output"]) == (0, 11), done.err
    assert [status for _, status, _ in done.steps] == ["reused", "completed"]
    assert recorded_effects(folder) == ["question", "search"], "a step ran twice"


def test_the_error_about_an_unserved_peer_says_how_to_fix_it(
    folder: Path, execute: Command
) -> None:
    (folder / "calls.py").write_text(CALLER_CODE)
    (folder / "open").touch()
    alone = execute("--input", "5", "--session", "mine", "--json", agent="calls:caller")
    assert alone.code == 4
    assert "add --with MODULE:answerer" in alone.json["error"]["message"]
    done = execute("--with", "calls:answerer", "--session", "mine", "--json", agent="calls:caller")
    assert (done.code, done.json["output"]) == (0, 11)
    later = execute("--input", "6", "--session", "mine", "--json", agent="calls:caller")
    assert "add --with MODULE:answerer" in later.json["error"]["message"], (
        "its queue was not deleted"
    )


def test_two_sessions_share_a_store(folder: Path) -> None:
    (folder / "flow.py").write_text(REPAIRED_CODE)
    command = [*EXEC, "flow:flow", "--json", "--input"]
    processes = [
        subprocess.Popen([*command, n], cwd=folder, stdout=subprocess.PIPE, text=True)
        for n in ("3", "4")
    ]
    assert [json.loads(each.communicate()[0])["output"] for each in processes] == [8, 10]


def test_only_one_of_two_concurrent_resumes_runs(folder: Path) -> None:
    command = [sys.executable, str(HERE / "exec_race.py"), str(TRIALS)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    trials = json.loads(done.stdout)
    assert [sorted(codes) for codes in trials["codes"]] == [[4, 7]] * TRIALS
    session = json.loads(next((folder / ".meshpoint/sessions").glob("*.json")).read_text())
    assert len(session["attempts"]) == 1 + TRIALS
    assert all("is in use by pid" in line for line in trials["refusals"])
    assert recorded_effects(folder) == ["fetch", "parse", *["rate"] * (1 + TRIALS)], (
        "a recorded step ran again"
    )
