"""Keys come from settings, variables and files, and no message contains one."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from meshpoint.errors import ConfigurationError
from meshpoint.settings import load

FIRST, SECOND = (base64.b64encode(each * 32).decode() for each in (b"\xff", b"b"))
AGENT = """
mesh: {namespace: demo, broker_url: "sqlite:///q.db"%s}
agent: {name: travel, entrypoint: "m:a", session_service: sql%s}
"""


def write(folder: Path, mesh: str = "", agent: str = "") -> Path:
    file = folder / "mesh.yaml"
    file.write_text(AGENT % (mesh and f", {mesh}", agent and f", {agent}"))
    return file


def test_agents_have_the_keys_of_the_mesh(tmp_path: Path) -> None:
    settings = load([write(tmp_path, f"encryption_keys: ['{FIRST}', '{SECOND}']")], {})
    assert [key.secret for key in settings.mesh.key_ring] == [b"\xff" * 32, b"b" * 32]
    assert settings.agents[0].encryption_keys == (FIRST, SECOND)
    assert FIRST not in repr(settings)
    own = load([write(tmp_path, f"encryption_keys: ['{FIRST}']", "encryption_keys: []")], {})
    assert own.agents[0].store_settings().keys == ()


def test_keys_come_from_variables_and_files(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# newest first\n{FIRST}\n\n{SECOND.replace('+', '-')}\n")
    settings = load([write(tmp_path, f"encryption_keys: 'file:{keys}'")], {})
    assert settings.mesh.encryption_keys == (FIRST, SECOND)
    env = {"MESHPOINT_AGENT__ENCRYPTION_KEYS": f"{SECOND}, {FIRST}"}
    env["MESHPOINT_AGENT__ENCRYPTION_TENANT"] = "acme"
    (agent,) = load([write(tmp_path)], env).agents
    assert [(key.secret[:1], key.tenant) for key in agent.key_ring] == [
        (b"b", "acme"),
        (b"\xff", "acme"),
    ]
    (child,) = type(settings).model_validate(settings.model_dump(mode="json")).agents
    assert child.encryption_keys == (FIRST, SECOND)


def test_clear_before_the_keys_stops_encrypting(tmp_path: Path) -> None:
    settings = load([write(tmp_path, f"encryption_keys: [clear, '{FIRST}']")], {})
    assert [key.secret for key in settings.agents[0].key_ring] == [b"", b"\xff" * 32]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("'short'", "is not a key in Base64"),
        (f"['{FIRST}', 'c2hvcnQ=']", r"\[2\]: has 5 bytes; a key has 32"),
        (f"['{FIRST}', '{FIRST}']", "has the same key twice"),
        ("'file:/missing'", "/missing cannot be read: No such file"),
        ("[1]", "is not a list of keys"),
        ("[clear]", "has no key after 'clear'"),
    ],
)
def test_a_wrong_key_is_refused_without_showing_it(
    tmp_path: Path, value: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        load([write(tmp_path, f"encryption_keys: {value}")], {})
    assert FIRST not in str(refused.value)
    assert "mesh.encryption_keys" in str(refused.value)


def test_a_working_memory_in_redis_needs_tls(tmp_path: Path) -> None:
    keys = f"encryption_keys: ['{FIRST}']"
    with pytest.raises(ConfigurationError, match=r"agent\.memory_url.*need TLS.*use rediss://"):
        load([write(tmp_path, keys, "memory_url: 'redis://localhost'")], {})
    assert load([write(tmp_path, keys, "memory_url: 'rediss://localhost'")], {})
