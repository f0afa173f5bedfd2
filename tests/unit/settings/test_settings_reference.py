"""The configuration page and the example files match the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshpoint.agents.entrypoint import load_versions
from meshpoint.settings import AgentSettings, MeshSettings, load
from meshpoint.settings.reference import render_page

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "configuration.md"
VARIABLES = {
    "BROKER_URL": "amqps://mesh:secret@broker.example/",
    "DATABASE_URL": "postgresql://mesh:secret@db.example/mesh",
}


def test_the_reference_page_contains_the_settings_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render_page(page), (
        "run: python -m meshpoint.settings.reference docs/reference/configuration.md"
    )


@pytest.mark.parametrize("key", [*MeshSettings.model_fields, *AgentSettings.model_fields])
def test_every_key_is_on_the_page(key: str) -> None:
    (line, *_) = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| `{key}` |")
    ]
    _, _, default, _, meaning, _ = line.split("|")
    assert default.strip()
    assert len(meaning.strip()) > 10


@pytest.mark.parametrize("name", ["travel.yaml", "production.yaml"])
def test_the_examples_can_be_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load([ROOT / "config" / name], env=VARIABLES)
    assert settings.agents
    assert all(agent.stateless_checkpointing for agent in settings.agents)
    assert [load_versions(agent.entrypoints).name for agent in settings.agents] == [
        agent_.name for agent_ in settings.agents
    ]
