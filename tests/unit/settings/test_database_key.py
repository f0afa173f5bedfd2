"""`database_url`: what it stands for, and which key takes precedence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshpoint.errors import ConfigurationError
from meshpoint.settings import AgentOptions, AgentSettings, MeshSettings, Settings, load

MESH, OWN, OTHER = (f"postgresql://mesh:secret@{host}/mesh" for host in ("m", "own", "other"))
EMBEDDED = "sqlite:///meshpoint.db"
LONG = {"stateless_checkpointing": True, "session_service": "sql", "session_db_url": OWN}

Loaded = Callable[..., Settings]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.chdir(tmp_path)

    def loaded(
        mesh: dict[str, Any], *agents: dict[str, Any], env: Mapping[str, str] | None = None
    ) -> Settings:
        """Load a file for each agent, or one with the mesh alone. The first has the mesh."""
        paths = [Path(f"{index}.yaml") for index, _ in enumerate(agents or ({},))]
        for index, path in enumerate(paths):
            content: dict[str, Any] = {"mesh": mesh} if index == 0 else {}
            if agents:
                identity = {"name": f"agent-{index}", "entrypoint": "m:a"}
                content["agent"] = identity | agents[index]
            path.write_text(yaml.safe_dump(content))
        return load(paths, env=env or {})

    return loaded


def stored(settings: Settings) -> tuple[bool, str, str]:
    """The long keys of the only agent."""
    (agent,) = settings.agents
    return agent.stateless_checkpointing, agent.session_service, agent.session_db_url


def refusal(
    loaded: Loaded, *sections: dict[str, Any], env: Mapping[str, str] | None = None
) -> str:
    with pytest.raises(ConfigurationError) as refused:
        loaded(*sections, env=env)
    line = str(refused.value)
    assert "\n" not in line
    assert "secret" not in line
    return line


@pytest.mark.parametrize(
    ("mesh", "agent", "expected"),
    [
        ({"database_url": MESH}, {}, (True, "sql", MESH)),
        ({}, {"database_url": OWN}, (True, "sql", OWN)),
        ({"database_url": MESH}, {"database_url": OWN}, (True, "sql", OWN)),
        ({"database_url": MESH}, {"session_db_url": OWN}, (True, "sql", OWN)),
        ({"database_url": MESH}, {"session_service": "sql"}, (True, "sql", MESH)),
        ({"database_url": MESH}, LONG, (True, "sql", OWN)),
        ({"database_url": MESH}, {"stateless_checkpointing": False}, (False, "sql", MESH)),
        ({"database_url": MESH}, {"stateless_checkpointing": True}, (True, "sql", MESH)),
        ({}, {"database_url": OWN, **LONG}, (True, "sql", OWN)),
        ({}, {"database_url": OWN, "stateless_checkpointing": "yes"}, (True, "sql", OWN)),
    ],
)
def test_a_long_key_wins_over_the_mesh(
    loaded: Loaded, mesh: dict[str, Any], agent: dict[str, Any], expected: tuple[object, ...]
) -> None:
    assert stored(loaded(mesh, agent)) == expected


def test_an_agent_can_refuse_the_database_of_the_mesh(loaded: Loaded, tmp_path: Path) -> None:
    settings = loaded({"database_url": MESH}, {"session_service": "memory"})
    assert stored(settings) == (False, "memory", f"sqlite:///{tmp_path}/meshpoint.db")
    both = {"session_service": "memory", "stateless_checkpointing": True}
    assert refusal(loaded, {"database_url": MESH}, both) == (
        "agent.stateless_checkpointing: paused tasks would have no database; "
        "add session_service: sql"
    )


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (
            {"stateless_checkpointing": False},
            "agent.stateless_checkpointing: false contradicts agent.database_url; "
            "remove stateless_checkpointing, or replace database_url with "
            "session_service: sql and session_db_url: URL",
        ),
        (
            {"session_service": "memory"},
            "agent.session_service: memory contradicts agent.database_url; "
            "remove database_url, or session_service",
        ),
        (
            {"session_db_url": OTHER},
            "agent.session_db_url: names another database than agent.database_url; "
            "remove session_db_url or database_url",
        ),
    ],
)
def test_the_keys_of_one_section_must_agree(
    loaded: Loaded, agent: dict[str, Any], said: str
) -> None:
    assert refusal(loaded, {"database_url": MESH}, {"database_url": OWN, **agent}) == said
    with pytest.raises(ConfigurationError) as refused:
        AgentOptions.model_validate({"database_url": OWN, **agent})
    assert str(refused.value) == said


def test_a_disagreement_names_the_file_and_the_agent(loaded: Loaded) -> None:
    wrong = {"database_url": OWN, "session_service": "memory"}
    assert refusal(loaded, {}, {}, wrong).startswith(
        "1.yaml: agent.session_service: memory contradicts 1.yaml: agent.database_url; "
    )


@pytest.mark.parametrize("section", ["mesh", "agent"])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://u:secret@h/d", "MySQL is not supported; use postgresql://"),
        ("nonsense://u:secret@h/d", "the scheme 'nonsense' is not supported"),
        ("sqlite:///:memory:", "does not name a file"),
        ("meshpoint.db", "is not a URL"),
        ("", "is not a URL"),
        (None, "is empty; use postgresql://user@host/name, or remove the key"),
        (["postgresql://u:secret@h/d"], "must be a valid string; meaning: "),
    ],
)
def test_an_invalid_url_is_named(loaded: Loaded, section: str, url: object, said: str) -> None:
    sections: dict[str, dict[str, Any]] = {"mesh": {}, "agent": {}}
    sections[section]["database_url"] = url
    line = refusal(loaded, *sections.values())
    assert line.startswith(f"{section}.database_url: {said}")


def test_an_invalid_long_key_is_named(loaded: Loaded) -> None:
    for key, value in (
        ("stateless_checkpointing", "maybe"),
        ("session_service", "mysql"),
        ("session_db_url", "meshpoint.db"),
        ("session_db_url", None),
    ):
        line = refusal(loaded, {}, {"database_url": OWN, key: value})
        assert line.startswith(f"agent.{key}: ")
        assert "contradicts" not in line


def test_a_relative_file_is_the_same_in_each_key(loaded: Loaded, tmp_path: Path) -> None:
    file = f"sqlite:///{tmp_path}/meshpoint.db"
    settings = loaded({}, {"database_url": EMBEDDED, "session_db_url": file})
    assert stored(settings) == (True, "sql", file)
    assert settings.agents[0].database_url == file
    settings = loaded({"database_url": EMBEDDED}, {})
    assert (settings.mesh.database_url, settings.agents[0].session_db_url) == (file, file)


@pytest.mark.parametrize(
    ("agent", "env", "expected"),
    [
        ({}, {"MESH__DATABASE_URL": OTHER}, (True, "sql", OTHER)),
        ({}, {"AGENT__DATABASE_URL": OTHER}, (True, "sql", OTHER)),
        (LONG, {"MESH__DATABASE_URL": OTHER}, (True, "sql", OWN)),
        (LONG, {"AGENT__DATABASE_URL": OTHER}, (True, "sql", OTHER)),
        ({"database_url": OWN}, {"MESH__DATABASE_URL": OTHER}, (True, "sql", OWN)),
        ({"database_url": OWN}, {"AGENT__DATABASE_URL": OTHER}, (True, "sql", OTHER)),
        ({"database_url": OWN}, {"AGENT__DATABASE_URL": ""}, (True, "sql", OWN)),
        ({"database_url": ""}, {"AGENT__DATABASE_URL": OTHER}, (True, "sql", OTHER)),
        ({"database_url": OWN}, {"AGENT__SESSION_DB_URL": OTHER}, (True, "sql", OTHER)),
        ({"database_url": OWN}, {"AGENT__STATELESS_CHECKPOINTING": "0"}, (False, "sql", OWN)),
        ({"database_url": OWN}, {"AGENT__STATELESS_CHECKPOINTING": "1"}, (True, "sql", OWN)),
        (
            {"stateless_checkpointing": False},
            {"AGENT__DATABASE_URL": OTHER},
            (True, "sql", OTHER),
        ),
    ],
)
def test_variables_override_the_files(
    loaded: Loaded, agent: dict[str, Any], env: dict[str, str], expected: tuple[object, ...]
) -> None:
    variables = {f"MESHPOINT_{name}": value for name, value in env.items()}
    assert stored(loaded({"database_url": MESH}, agent, env=variables)) == expected


def test_a_variable_can_take_the_database_away(loaded: Loaded) -> None:
    env = {"MESHPOINT_AGENT__SESSION_SERVICE": "memory"}
    settings = loaded({"database_url": MESH}, {"database_url": OWN}, env=env)
    assert stored(settings)[:2] == (False, "memory")
    assert settings.agents[0].database_url is None


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"AGENT__DATABASE_URL": OWN, "AGENT__STATELESS_CHECKPOINTING": "no"},
            "MESHPOINT_AGENT__STATELESS_CHECKPOINTING: false contradicts "
            "MESHPOINT_AGENT__DATABASE_URL; ",
        ),
        ({"AGENT__DATABASE_URL": "mysql://u:secret@h/d"}, "MESHPOINT_AGENT__DATABASE_URL: MySQL"),
        ({"DATABASE_URL": OWN}, "MESHPOINT_DATABASE_URL: has no effect; "),
    ],
)
def test_an_invalid_variable_is_named(loaded: Loaded, env: dict[str, str], said: str) -> None:
    variables = {f"MESHPOINT_{name}": value for name, value in env.items()}
    assert refusal(loaded, {}, {}, env=variables).startswith(said)


def test_references_to_variables_are_replaced(loaded: Loaded) -> None:
    mesh = {"database_url": "${DATABASE_URL, sqlite:////tmp/mesh.db}"}
    assert stored(loaded(mesh, {})) == (True, "sql", "sqlite:////tmp/mesh.db")
    assert stored(loaded(mesh, {}, env={"DATABASE_URL": OWN})) == (True, "sql", OWN)
    assert "the variable DB is not set" in refusal(loaded, {}, {"database_url": "${DB}"})


@pytest.mark.parametrize(
    ("mesh", "agent", "env", "name"),
    [
        ({"database_url": MESH}, {}, {}, "mesh.database_url"),
        ({}, {}, {"MESHPOINT_MESH__DATABASE_URL": OWN}, "MESHPOINT_MESH__DATABASE_URL"),
        ({}, {"database_url": OWN}, {}, "agent.database_url"),
        ({}, {}, {"MESHPOINT_AGENT__DATABASE_URL": OWN}, "MESHPOINT_AGENT__DATABASE_URL"),
        ({"database_url": EMBEDDED}, {"session_db_url": OWN}, {}, "agent.session_db_url"),
    ],
)
def test_a_missing_driver_names_the_key_that_was_written(
    loaded: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    mesh: dict[str, Any],
    agent: dict[str, Any],
    env: dict[str, str],
    name: str,
) -> None:
    monkeypatch.setattr(
        "meshpoint.extras.find_spec",
        lambda module: None if module == "asyncpg" else find_spec(module),
    )
    line = refusal(loaded, mesh, agent, env=env)
    assert line.startswith(f"{name}: PostgreSQL needs the package asyncpg; ")


def test_the_database_of_the_mesh_is_that_of_all_agents_of_all_files(loaded: Loaded) -> None:
    off, versions = {"stateless_checkpointing": False}, {"entrypoint": ["m:new", "m:old"]}
    own = {"database_url": OWN, "entrypoint": ["m:a"]}
    agents = loaded({"database_url": MESH}, {}, off, versions, own).agents
    assert [
        (each.stateless_checkpointing, each.session_service, each.session_db_url)
        for each in agents
    ] == [(True, "sql", MESH), (False, "sql", MESH), (True, "sql", MESH), (True, "sql", OWN)]
    assert agents[2].entrypoints == ("m:new", "m:old")


def test_a_mesh_without_agents_may_have_a_database(loaded: Loaded) -> None:
    assert loaded({"database_url": MESH}).mesh.database_url == MESH


@pytest.mark.parametrize("agent", [{}, {"database_url": OWN}, {"stateless_checkpointing": False}])
def test_settings_survive_their_way_to_another_process(
    loaded: Loaded, agent: dict[str, Any]
) -> None:
    settings = loaded({"database_url": MESH}, agent)
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_the_short_key_works_without_files() -> None:
    agent = AgentSettings(name="a", entrypoint="m:a", database_url=OWN)
    assert stored(Settings(agents=(agent,))) == (True, "sql", OWN)


def test_no_representation_shows_the_password() -> None:
    mesh = MeshSettings(database_url=MESH)
    agent = AgentSettings(name="a", entrypoint="m:a", database_url=OWN)
    assert ":secret@" not in repr(Settings(mesh=mesh, agents=(agent,)))
