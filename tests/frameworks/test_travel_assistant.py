"""The example runs in every framework, and prints what its README shows."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenario import FRAMEWORKS

from code_blocks import code_blocks
from meshpoint.agents.entrypoint import load_agent
from meshpoint.frameworks import APPROVAL, Approval
from meshpoint.local import local_mesh
from meshpoint.settings import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "travel_assistant"
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
KILLED = FRAMEWORKS if os.environ.get("MESHPOINT_FRAMEWORKS") else ("pydantic_ai",)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, from which its modules are imported."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delenv("TRAVEL_MODEL", raising=False)
    return EXAMPLE


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("config", "request_"),
    [("travel.yaml", {"city": "Rome", "days": 2}), ("unwrapped.yaml", "2 days in Rome")],
    ids=["wrapped", "unwrapped"],
)
async def test_each_assistant_plans_the_trip(
    framework: str,
    config: str,
    request_: object,
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As each configuration serves it, and with the same calls."""
    pytest.importorskip(FRAMEWORKS[framework])
    monkeypatch.setenv("TRAVEL_LEDGER", str(tmp_path / "ledger"))
    served = load([example / config], env={"FRAMEWORK": framework}).agents
    agents = [load_agent(str(each.entrypoint), each.name) for each in served]
    async with local_mesh(*agents, peers=served[0].peers) as mesh:
        task = await mesh.send("travel", request_)
        async for update in task.updates():
            if update.kind == "question":
                assert update.prompt == 'Run book with {"city": "Rome", "price": 240}?'
                await task.complete(APPROVAL, Approval(approved=True))
        plan = await task.result()
    assert plan.strip() == "Rome is booked for 240 EUR. Have a good trip!"
    calls = [line.split()[1] for line in (tmp_path / "ledger").read_text().splitlines()]
    assert sorted(calls) == ["book", "flights", "hotels", "model", "model", "model"]
    assert calls[0] == calls[3] == calls[5] == "model"


@pytest.mark.slow
@pytest.mark.parametrize("framework", KILLED)
def test_a_killed_assistant_prints_what_its_readme_shows(
    framework: str, example: Path, tmp_path: Path
) -> None:
    pytest.importorskip(FRAMEWORKS[framework])
    variables = {**os.environ, "COLUMNS": "80", "TMPDIR": str(tmp_path), "TRAVEL_MODEL": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example / "travel_assistant.py"), framework],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    names = importlib.import_module("travel_assistant").FRAMEWORKS
    (shown,) = code_blocks(README, "text")
    shown = shown.replace("Pydantic AI", names[framework])
    printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert (done.returncode, printed, done.stderr) == (0, shown, "")
    assert not list(tmp_path.iterdir()), "the example left files behind"
