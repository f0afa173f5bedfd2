"""The documentation is true: examples run, links resolve, and everything named exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import code_blocks
from meshpoint.adapters.sql.tables import metadata
from meshpoint.demo import screen
from meshpoint.model.checkpoint import CallState, TaskState
from meshpoint.model.events import EFFECTS, LOOKS, Step
from meshpoint.settings import AgentSettings, MeshSettings, load

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "meshpoint"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOW = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text(encoding="utf-8")
EVENTS = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
GUARANTEES = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without the header row."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_the_example_runs_as_pasted_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "pasted.py").write_text(code_blocks(README, "python")[0], encoding="utf-8")
    command = [sys.executable, "-W", "error", "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (promised,) = re.findall(r"^It prints `(.+?)`", README, flags=re.MULTILINE)
    assert (done.returncode, done.stdout) == (0, promised + "\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pasted.py"]


def test_the_configuration_on_the_page_is_the_example(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "run-on-servers.md").read_text(encoding="utf-8")
    shown = tmp_path / "shown.yaml"
    shown.write_text(code_blocks(page, "yaml")[0], encoding="utf-8")
    whole = load([ROOT / "examples" / "replicas" / "travel.yaml"], env={})
    assert load([shown], env={}) == whole


def test_the_demonstration_prints_the_lines_of_the_account() -> None:
    account = code_blocks(README, "text")[0].partition("\n\n")[2].splitlines()
    assert [line.strip().partition("   ")[2] for line in account] == [label for _, label in screen._LABELS]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


HOW_TO = ROOT / "docs" / "how-to"
SCRIPTS = [
    pytest.param(code, printed, id=f"{name}-{number}")
    for name in ("write-an-agent", "call-peers")
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


def test_no_script_lacks_its_output() -> None:
    pages = [(HOW_TO / f"{name}.md").read_text(encoding="utf-8") for name in ("write-an-agent", "call-peers")]
    assert len(SCRIPTS) == sum(len(code_blocks(page, "python")) for page in pages)


@pytest.mark.parametrize("name", ["test-an-agent", "write-an-adapter"])
def test_the_tests_on_a_page_pass(name: str, tmp_path: Path) -> None:
    module = "\n\n".join(code_blocks((HOW_TO / f"{name}.md").read_text(encoding="utf-8"), "python"))
    (tmp_path / "test_pasted.py").write_text(module, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_quickstart_can_be_served(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (tmp_path / "agents.py").write_text(code_blocks(page, "python")[0], encoding="utf-8")
    for name, text in zip(("travel", "peers"), code_blocks(page, "yaml"), strict=True):
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    served = {each.entrypoint for name in ("travel", "peers") for each in load([tmp_path / f"{name}.yaml"]).agents}
    code = f"from meshpoint import load_agent\nfor each in {sorted(served)}: print(load_agent(each).name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["flights", "hotels", "travel"], done.stderr


def anchors(page: str) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", [README, HOW, GUARANTEES], ids=["README", "how-it-works", "guarantees"])
def test_settings_are_called_by_their_names(page: str) -> None:
    keys = {*MeshSettings.model_fields, *AgentSettings.model_fields}
    named = {name.partition(":")[0] for name in quoted(page)}
    assert {
        name for name in named if re.fullmatch(r"[a-z_]+_(seconds|policy|limit|failure|checkpointing)", name)
    } <= keys


def test_every_file_that_is_named_exists() -> None:
    named = {name for name in quoted(HOW) if name.endswith((".py", "/"))}
    assert len(named) > 40
    for name in named:
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name


def test_every_event_is_told_where_the_page_says() -> None:
    told: dict[str, list[str]] = {}
    for events, _, files in rows(EVENTS, "All events"):
        for event in quoted(events):
            assert event not in told
            told[event] = quoted(files)
    assert set(told) == {step.value for step in Step}
    for event, places in told.items():
        for file in places:
            assert f"Step.{event.upper()}" in (PACKAGE / file).read_text(encoding="utf-8"), (event, file)


def test_the_page_says_how_often_an_event_is_told() -> None:
    told = {event: phases for events, phases, _ in rows(EVENTS, "All events") for event in quoted(events)}
    twice = {event for event, phases in told.items() if phases.startswith("before, after")}
    assert twice == {step.value for step in EFFECTS}
    assert {event for event, phases in told.items() if "when" in phases} == {step.value for step in LOOKS}


def test_no_file_tells_an_event_that_the_page_does_not_know_of() -> None:
    listed = {
        (event, file)
        for events, _, files in rows(EVENTS, "All events")
        for event in quoted(events)
        for file in quoted(files)
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
    drawn = (ROOT / "docs" / "images" / picture).read_text(encoding="utf-8")
    transitions = {letter: path for letter, path, *_ in rows(HOW, heading)}
    assert set(re.findall(r'class="letter"[^>]*>(\w)<', drawn)) == set(transitions)
    names = "".join(re.findall(r'class="name"[^>]*>([^<]+)<', drawn))
    for state in states:
        assert state.value in names
        assert any(state.value in path or "ended" in path for path in transitions.values())


@pytest.mark.parametrize(
    "table", ["agent_paused_tasks", "agent_peer_sub_tasks", "agent_parallel_invocations", "agent_checkpoints"]
)
def test_columns_of_the_source_documents_are_where_the_page_says(table: str) -> None:
    page = (ROOT / "docs" / "explanation" / "from-the-source-documents.md").read_text(encoding="utf-8")
    section = re.split(r"^##", page.partition(f"### Table `{table}`\n")[2], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(lines) > 5
    listed = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    for _, here, _ in listed:
        names = quoted(here)
        elsewhere = [metadata.tables[name] for name in names if name in metadata.tables]
        columns = (elsewhere or [metadata.tables[table]])[0].columns
        assert {name for name in names if name not in metadata.tables} <= set(columns.keys()), here


def test_every_test_that_is_named_exists() -> None:
    named = [name for name in quoted(GUARANTEES) if name.startswith("tests/") and "::" in name]
    assert len(named) > 20
    for name in named:
        file, _, function = name.partition("::")
        assert re.search(rf"^async def {function}\(|^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), name


def test_a_crash_is_described_at_each_step_with_an_effect() -> None:
    described = {name for step, *_ in rows(GUARANTEES, "A crash at each step") for name in quoted(step)}
    effects = {
        event for events, told, _ in rows(EVENTS, "All events") if "before" in told for event in quoted(events)
    }
    assert effects - {"sweep"} <= described


def test_the_letters_of_the_crash_table_are_explained() -> None:
    table = [row for row in rows(GUARANTEES, "A crash at each step") if len(row) == 4]
    tests = [row for row in rows(GUARANTEES, "A crash at each step") if len(row) == 3]
    used = {letter for row in table for letter in re.findall(r"\b[CK]\d\b", row[3])}
    assert used | {"M"} == {row[0] for row in tests if row[0] and not row[0].startswith("---")}
