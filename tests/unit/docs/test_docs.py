"""The documentation is true: examples run, links resolve, and everything named exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import code_blocks
from meshpoint.adapters.sql.tables import metadata
from meshpoint.demo import screen
from meshpoint.model.events import Step
from meshpoint.model.tasks import CallState, TaskState
from meshpoint.settings import AgentSettings, MeshSettings, load

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "meshpoint"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOW_IT_WORKS = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text(encoding="utf-8")
EVENTS = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
GUARANTEES = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")


def table_rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without the header row."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_the_example_runs_as_pasted_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "pasted.py").write_text(code_blocks(README, "python")[0], encoding="utf-8")
    command = [sys.executable, "-W", "error", "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (expected_output,) = re.findall(r"^It prints `(.+?)`", README, flags=re.MULTILINE)
    assert (done.returncode, done.stdout) == (0, expected_output + "\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pasted.py"]


def test_the_documented_configuration_is_the_example(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "run-on-servers.md").read_text(encoding="utf-8")
    shown = tmp_path / "shown.yaml"
    shown.write_text(code_blocks(page, "yaml")[0], encoding="utf-8")
    example = load([ROOT / "examples" / "replicas" / "travel.yaml"], env={})
    assert load([shown], env={}) == example


def test_the_demo_prints_the_lines_shown_in_the_readme() -> None:
    account = code_blocks(README, "text")[0].partition("\n\n")[2].splitlines()
    assert [line.strip().partition("   ")[2] for line in account] == [
        label for _, label in screen._LABELS
    ]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


HOW_TO = ROOT / "docs" / "how-to"
SCRIPTED_PAGES = ("write-an-agent", "call-peers", "call-from-a-service", "observe")
"""Pages whose Python blocks all print the block that follows."""
SCRIPTS = [
    pytest.param(code, printed, id=f"{name}-{number}")
    for name in SCRIPTED_PAGES
    for number, (code, printed) in enumerate(
        re.findall(
            r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$",
            (HOW_TO / f"{name}.md").read_text(encoding="utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        ),
        1,
    )
]


@pytest.mark.parametrize(("code", "printed"), SCRIPTS)
def test_a_script_prints_what_the_page_shows(code: str, printed: str, tmp_path: Path) -> None:
    (tmp_path / "pasted.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_every_documented_script_shows_its_output() -> None:
    pages = [(HOW_TO / f"{name}.md").read_text(encoding="utf-8") for name in SCRIPTED_PAGES]
    assert len(SCRIPTS) == sum(len(code_blocks(page, "python")) for page in pages)


@pytest.mark.parametrize("name", ["test-an-agent", "write-an-adapter"])
def test_the_tests_in_the_docs_pass(name: str, tmp_path: Path) -> None:
    module = "\n\n".join(
        code_blocks((HOW_TO / f"{name}.md").read_text(encoding="utf-8"), "python")
    )
    (tmp_path / "test_pasted.py").write_text(module, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *("-p", "no:cacheprovider"),
        *("-p", "no:langsmith_plugin"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_migrations_on_the_page_continue_a_checkpoint_of_the_old_version(
    tmp_path: Path,
) -> None:
    page = (HOW_TO / "migrate-a-checkpoint.md").read_text(encoding="utf-8")
    first, second = (shlex.split(line) for line in code_blocks(page, "sh"))
    before, after = code_blocks(page, "python")

    def run(command: list[str], source: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "analyst.py").write_text(source, encoding="utf-8")
        program = str(Path(sys.executable).with_name(command[0]))
        return subprocess.run(
            [program, *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    failed = run([*first, "--json"], before)
    assert failed.returncode == 4, failed.stderr
    assert json.loads(failed.stdout)["checkpoint"]["agent_version"] == "1.0"
    broken = run(second, after.replace('["currency"] = "USD"', '["currency"] = missing'))
    assert broken.returncode == 1
    assert "migration add_currency (1.1 -> 1.2): NameError: name 'missing'" in broken.stderr
    done = run(second, after)
    assert (done.returncode, done.stdout) == (0, code_blocks(page, "text")[0]), done.stderr


QUICKSTART_RUN = """
import asyncio
from meshpoint import load_agent
from meshpoint.local import local_mesh

async def main():
    async with local_mesh(*map(load_agent, {entrypoints})) as mesh:
        print(await mesh.call("travel", "Rome"))

asyncio.run(main())
"""


def test_the_quickstart_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    code = code_blocks(page, "python")[0]
    assert code.count("sleep(40)") == 2
    (tmp_path / "agents.py").write_text(code.replace("sleep(40)", "sleep(0)"), encoding="utf-8")
    for name, text in zip(("travel", "peers"), code_blocks(page, "yaml"), strict=True):
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    entrypoints = [
        agent.entrypoint
        for name in ("travel", "peers")
        for agent in load([tmp_path / f"{name}.yaml"]).agents
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUICKSTART_RUN.format(entrypoints=entrypoints)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = code_blocks(page, "text")[-1]
    line = re.compile(r"process \d+")
    assert line.sub("process N", done.stdout.splitlines()[-1]) == line.sub(
        "process N", shown.strip()
    ), done.stderr


def heading_anchors(page: str) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_valid_targets(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        destination = (path.parent / file).resolve() if file else path
        assert destination.exists(), target
        if anchor:
            assert anchor in heading_anchors(destination.read_text(encoding="utf-8")), target


@pytest.mark.parametrize(
    "page", [README, HOW_IT_WORKS, GUARANTEES], ids=["README", "how-it-works", "guarantees"]
)
def test_settings_mentioned_in_the_docs_exist(page: str) -> None:
    keys = {*MeshSettings.model_fields, *AgentSettings.model_fields}
    named = {name.partition(":")[0] for name in code_spans(page)}
    assert {
        name
        for name in named
        if re.fullmatch(r"[a-z_]+_(seconds|policy|limit|failure|checkpointing)", name)
    } <= keys


def test_every_file_mentioned_in_the_docs_exists() -> None:
    named = {name for name in code_spans(HOW_IT_WORKS) if name.endswith((".py", "/"))}
    assert len(named) > 40
    for name in named:
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name


def test_every_event_is_emitted_by_the_documented_files() -> None:
    phases_by_event: dict[str, list[str]] = {}
    for events, _, files in table_rows(EVENTS, "All events"):
        for event in code_spans(events):
            assert event not in phases_by_event
            phases_by_event[event] = code_spans(files)
    assert set(phases_by_event) == {step.value for step in Step}
    for event, expected_files in phases_by_event.items():
        for file in expected_files:
            assert f"Step.{event.upper()}" in (PACKAGE / file).read_text(encoding="utf-8"), (
                event,
                file,
            )


def test_the_phases_of_every_event_are_documented() -> None:
    phases_by_event = {
        event: phases
        for events, phases, _ in table_rows(EVENTS, "All events")
        for event in code_spans(events)
    }
    twice = {
        event for event, phases in phases_by_event.items() if phases.startswith("before, after")
    }
    assert twice == {step.value for step in Step if not step.is_informational}
    assert {event for event, phases in phases_by_event.items() if "when" in phases} == {
        step.value for step in Step if step.is_search
    }


def test_no_file_emits_an_undocumented_event() -> None:
    listed = {
        (event, file)
        for events, _, files in table_rows(EVENTS, "All events")
        for event in code_spans(events)
        for file in code_spans(files)
    }
    for folder in ("engine",):
        for path in (PACKAGE / folder).glob("*.py"):
            for name in re.findall(r"Step\.([A-Z_]+)\b", path.read_text(encoding="utf-8")):
                assert (name.lower(), str(path.relative_to(PACKAGE))) in listed


@pytest.mark.parametrize(
    ("heading", "picture", "states"),
    [("States of a task", "states.svg", TaskState), ("States of a call", "calls.svg", CallState)],
)
def test_the_picture_and_the_table_have_the_same_transitions(
    heading: str, picture: str, states: type[TaskState | CallState]
) -> None:
    diagram = (ROOT / "docs" / "images" / picture).read_text(encoding="utf-8")
    transitions = {label: path for label, path, *_ in table_rows(HOW_IT_WORKS, heading)}
    assert set(re.findall(r'class="letter"[^>]*>(\w)<', diagram)) == set(transitions)
    names = "".join(re.findall(r'class="name"[^>]*>([^<]+)<', diagram))
    for state in states:
        assert state.value in names
        assert any(state.value in path or "ended" in path for path in transitions.values())


@pytest.mark.parametrize(
    "table",
    [
        "agent_paused_tasks",
        "agent_peer_sub_tasks",
        "agent_parallel_invocations",
        "agent_checkpoints",
    ],
)
def test_documented_columns_exist_in_their_tables(table: str) -> None:
    page = (ROOT / "docs" / "explanation" / "from-the-source-documents.md").read_text(
        encoding="utf-8"
    )
    section = re.split(r"^##", page.partition(f"### Table `{table}`\n")[2], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(lines) > 5
    listed = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    for _, column, _ in listed:
        names = code_spans(column)
        elsewhere = [metadata.tables[name] for name in names if name in metadata.tables]
        columns = (elsewhere or [metadata.tables[table]])[0].columns
        assert {name for name in names if name not in metadata.tables} <= set(columns.keys()), (
            column
        )


def test_every_test_mentioned_in_the_docs_exists() -> None:
    named = [name for name in code_spans(GUARANTEES) if name.startswith("tests/") and "::" in name]
    assert len(named) > 20
    for name in named:
        file, _, function = name.partition("::")
        assert re.search(
            rf"^async def {function}\(|^def {function}\(", (ROOT / file).read_text(), re.MULTILINE
        ), name


def test_a_crash_is_described_at_each_step_with_an_effect() -> None:
    described = {
        name
        for step, *_ in table_rows(GUARANTEES, "A crash at each step")
        for name in code_spans(step)
    }
    effects = {
        event
        for events, phases_by_event, _ in table_rows(EVENTS, "All events")
        if "before" in phases_by_event
        for event in code_spans(events)
    }
    assert effects - {"sweep"} <= described


def test_the_labels_of_the_crash_table_are_explained() -> None:
    table = [row for row in table_rows(GUARANTEES, "A crash at each step") if len(row) == 4]
    tests = [row for row in table_rows(GUARANTEES, "A crash at each step") if len(row) == 3]
    used = {label for row in table for label in re.findall(r"\b[CK]\d\b", row[3])}
    assert used | {"M"} == {row[0] for row in tests if row[0] and not row[0].startswith("---")}
