"""Settings: what is valid, and that each mistake is one line with its key and its fix."""

from __future__ import annotations

import dataclasses
import importlib.util
import tracemalloc
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from meshpoint import extras
from meshpoint.errors import ConfigurationError
from meshpoint.model.options import Options
from meshpoint.settings import AgentSettings, MeshSettings, Settings, StoreSettings, load, urls

Write = Callable[..., Path]

TRAVEL_CONFIG = """
agent:
  name: travel
  entrypoint: my_agents.travel:travel
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write(content: str, name: str = "mesh.yaml") -> Path:
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return Path(name)

    return write


def refusal_line(*paths: Path, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load(paths, env=env or {})
    line = str(refused.value)
    assert "\n" not in line
    assert "pydantic" not in line
    return line


def test_a_file_defines_a_mesh_and_its_agent(write: Write, tmp_path: Path) -> None:
    settings = load(
        [
            write("""
mesh:
  namespace: demo
agent:
  name: travel
  entrypoint: my_agents.travel:travel
  stateless_checkpointing: true
  session_service: sql
  session_db_url: postgresql://mesh@db/mesh
  peer_timeout_seconds: 90
""")
        ],
        env={},
    )
    assert settings.mesh.namespace == "demo"
    assert settings.mesh.broker_url == f"sqlite:///{tmp_path}/meshpoint.db"
    (travel,) = settings.agents
    assert (travel.name, travel.session_db_url) == ("travel", "postgresql://mesh@db/mesh")
    assert travel.options() == Options(
        stateless_checkpointing=True, peer_timeout=timedelta(seconds=90)
    )


def test_without_files_the_defaults_apply(write: Write, tmp_path: Path) -> None:
    settings = load([], env={})
    assert (settings.agents, settings.mesh) == ((), MeshSettings())


def another_value(name: str, value: object) -> object:
    """A valid value of the option `name` that differs from its default `value`."""
    choices = get_args(get_type_hints(Options)[name])
    match value:
        case bool():
            return not value
        case str():
            return next(choice for choice in choices if choice != value)
        case timedelta():
            return value * 0.5
        case int():
            return value + 1
        case tuple():
            return (*value, "pin")
        case dataclasses.MISSING:  # peer_logins
            return {"flights": "login"}
        case _:
            return "7.0"


@pytest.mark.parametrize("field", dataclasses.fields(Options), ids=lambda field: field.name)
def test_every_option_can_be_set(field: dataclasses.Field[object]) -> None:
    changed = another_value(field.name, field.default)
    key, value = field.name, changed
    if isinstance(changed, timedelta):
        key, value = f"{field.name}_seconds", changed.total_seconds()
    needed = {"stateless_checkpointing": True, "session_service": "sql"}
    if key == "lease_seconds":
        needed["renew_interval_seconds"] = 1
    options = AgentSettings.model_validate(
        {"name": "a", "entrypoint": "m:a", **needed, key: value}
    ).options()
    assert getattr(options, field.name) == changed
    assert getattr(options, field.name) != field.default


def test_an_agent_without_settings_has_the_options_defaults() -> None:
    assert AgentSettings(name="a", entrypoint="m:a").options() == Options()


def test_the_durations_of_the_store_are_settings() -> None:
    agent = AgentSettings(
        name="a",
        entrypoint="m:a",
        dispatch_lease_seconds=1,
        tombstone_ttl_seconds=2,
        parked_limit_seconds=3,
        keep_security_context=True,
    )
    timings = agent.store_settings().timings
    assert (timings.dispatch_lease, timings.tombstone_ttl, timings.parked_limit) == (
        timedelta(seconds=1),
        timedelta(seconds=2),
        timedelta(seconds=3),
    )
    assert timings.keep_security_context


def test_a_store_without_an_agent_has_the_defaults_of_an_agents_store() -> None:
    url = "sqlite:////data/mesh.db"
    agent = AgentSettings(name="a", entrypoint="m:a", session_db_url=url)
    assert StoreSettings.at(url, key="--db") == agent.store_settings()


@pytest.mark.parametrize("url", ["mysql://h/d", "sqlite:///:memory:", "meshpoint.db"])
def test_a_store_names_the_option_that_its_url_came_from(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--db: "):
        StoreSettings.at(url, key="--db")


@pytest.mark.parametrize(
    ("written", "env", "read"),
    [
        ("${NAME}", {"NAME": "travel"}, "travel"),
        ("${NAME, travel}", {}, "travel"),
        ("${NAME,travel}", {"NAME": "flights"}, "flights"),
        ("a-${X}-${Y, b}", {"X": "x"}, "a-x-b"),
    ],
)
def test_variables_are_replaced(
    write: Write, written: str, env: dict[str, str], read: str
) -> None:
    settings = load([write(f"agent:\n  name: {written}\n  entrypoint: m:a\n")], env=env)
    assert settings.agents[0].name == read


def test_a_variable_is_never_parsed_as_yaml(write: Write) -> None:
    path = write("agent:\n  name: a\n  entrypoint: m:a\n  app_version: ${VERSION}\n")
    assert load([path], env={"VERSION": "x: {y"}).agents[0].app_version == "x: {y"


def test_a_variable_can_be_a_number(write: Write) -> None:
    path = write("agent:\n  name: a\n  entrypoint: m:a\n  max_concurrency: ${SLOTS, 3}\n")
    assert load([path], env={}).agents[0].max_concurrency == 3


def test_a_default_may_be_empty_and_two_dollars_escape(write: Write) -> None:
    path = write("agent:\n  name: a\n  entrypoint: m:a\n  app_version: $${A}${B, }\n")
    assert load([path], env={}).agents[0].app_version == "${A}"


def test_a_variable_that_is_not_set_is_named_with_its_key(write: Write) -> None:
    line = refusal_line(write(TRAVEL_CONFIG + "  session_db_url: ${DATABASE_URL}\n"))
    assert line.startswith(
        "mesh.yaml: agent.session_db_url: the variable DATABASE_URL is not set; "
    )


def test_a_reference_without_a_name_is_refused(write: Write) -> None:
    assert "${NAME}" in refusal_line(write(TRAVEL_CONFIG + "  app_version: ${1}\n"))


def test_the_environment_overrides_files(write: Write) -> None:
    env = {
        "MESHPOINT_MESH__NAMESPACE": "other",
        "MESHPOINT_AGENT__MAX_CONCURRENCY": "3",
        "MESHPOINT_AGENT__SESSION_SERVICE": "sql",
        "MESHPOINT_AGENT__STATELESS_CHECKPOINTING": "true",
        "MESHPOINT_AGENT__APP_VERSION": "",
    }
    settings = load(
        [write("mesh: {namespace: demo}" + TRAVEL_CONFIG + "  app_version: '7'\n")], env=env
    )
    (agent,) = settings.agents
    assert settings.mesh.namespace == "other"
    assert (agent.max_concurrency, agent.session_service, agent.stateless_checkpointing) == (
        3,
        "sql",
        True,
    )
    assert agent.app_version == "7", "an empty variable must not override"


def test_the_process_environment_is_not_read_when_another_is_given(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHPOINT_MESH__NAMESPACE", "leaked")
    assert load([], env={}).mesh.namespace == "meshpoint"


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("MESHPOINT_MESH__BROKER", "did you mean 'broker_url'?"),
        ("MESHPOINT_BROKER_URL", "write MESHPOINT_MESH__BROKER_URL"),
        ("MESHPOINT_LEASE_SECONDS", "write MESHPOINT_AGENT__LEASE_SECONDS"),
        ("MESHPOINT_AGENTS__NAME", "has an unknown section"),
        ("MESHPOINT_AGENT__LEASE_SECONDS", "must be a valid number, not 'x'"),
        ("MESHPOINT_AGENT__NAME", "MESHPOINT_AGENT__NAME"),
    ],
)
def test_an_invalid_variable_is_named(write: Write, variable: str, said: str) -> None:
    value = "not valid!" if variable.endswith("NAME") else "x"
    line = refusal_line(write(TRAVEL_CONFIG), env={variable: value})
    assert line.startswith(f"{variable}: ")
    assert said in line


def test_variables_set_by_kubernetes_are_ignored(write: Write) -> None:
    env = {"MESHPOINT_PORT_5672_TCP_ADDR": "10.0.0.1", "MESHPOINT_SERVICE_HOST": "10.0.0.1"}
    assert load([write(TRAVEL_CONFIG)], env=env).agents[0].name == "travel"


def test_an_ambiguous_agent_variable_is_refused(write: Write) -> None:
    path = write("agents:\n- {name: a, entrypoint: 'm:a'}\n- {name: b, entrypoint: 'm:b'}\n")
    assert "cannot apply to 2 agents" in refusal_line(
        path, env={"MESHPOINT_AGENT__LEASE_SECONDS": "20"}
    )


def test_agents_of_several_files_are_combined(write: Write) -> None:
    first = write("mesh: {namespace: demo}\nagents:\n- {name: a, entrypoint: 'm:a'}\n", "a.yaml")
    second = write(
        "mesh: {namespace: demo, delivery_limit: 30}\nagent: {name: b, entrypoint: 'm:b'}\n",
        "b.yaml",
    )
    settings = load([first, second], env={})
    assert [agent.name for agent in settings.agents] == ["a", "b"]
    assert (settings.mesh.namespace, settings.mesh.delivery_limit) == ("demo", 30)


def test_files_with_different_meshes_are_refused(write: Write) -> None:
    first, second = (
        write("mesh: {namespace: a}\n", "a.yaml"),
        write("mesh: {namespace: b}\n", "b.yaml"),
    )
    assert refusal_line(first, second).startswith("b.yaml: mesh.namespace: differs from the value")


def test_a_mistake_in_one_of_several_files_names_the_file(write: Write) -> None:
    line = refusal_line(write(TRAVEL_CONFIG, "a.yaml"), write("agent: {name: b}\n", "b.yaml"))
    assert line.startswith("b.yaml: agent.entrypoint: is missing")


def test_two_agents_of_one_name_are_refused(write: Write) -> None:
    line = refusal_line(write(TRAVEL_CONFIG, "a.yaml"), write(TRAVEL_CONFIG, "b.yaml"))
    assert line.startswith("b.yaml: agent.name: two agents are called 'travel'")


def test_agents_inherit_the_message_limit_of_the_mesh(write: Write) -> None:
    settings = load([write("mesh: {max_message_bytes: 2048}" + TRAVEL_CONFIG)], env={})
    assert settings.agents[0].options().max_message_bytes == 2048


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("agent:\n  name: travel\n", "agent.entrypoint: is missing"),
        (
            "agent:\n  name: travel\n  entrypont: m:a\n",
            "agent.entrypont: is not a known key; did you mean 'entrypoint'",
        ),
        ("agnet:\n  name: travel\n", "agnet: is not a known key; did you mean 'agent'?"),
        (
            "mesh: {wholly_different: 1}\n",
            "known keys are broker_url, database_url, delivery_limit,",
        ),
        (
            TRAVEL_CONFIG + "  namespace: demo\n",
            "agent.namespace: is a key of mesh; move it under 'mesh:'",
        ),
        ("mesh: {session_service: sql}\n", "mesh.session_service: is a key of agent"),
        (
            "broker_url: sqlite:///q.db\n",
            "broker_url: is a key of mesh; move it under 'mesh:'",
        ),
        *[
            (
                TRAVEL_CONFIG + f"  peer_timeout_seconds: {value!r}\n",
                f"peer_timeout_seconds: must be a valid number, not {value!r}; write {seconds}",
            )
            for value, seconds in (("15s", "15; "), ("5 min", "300; "), ("500ms", "0.5; "))
        ],
        (
            TRAVEL_CONFIG + "  stateless_checkpointing: true\n",
            "agent.stateless_checkpointing: paused tasks would have no",
        ),
        (
            TRAVEL_CONFIG + "  ack_policy: on_receipt\n",
            "agent.ack_policy: on_receipt without session_service: sql would lose requests",
        ),
        (
            TRAVEL_CONFIG + "  memory_url: redis://u:secret@h/0\n",
            "agent.memory_url: without session_service: sql, working memories stay in the "
            "process, and Redis would not be used; "
            "add stateless_checkpointing: true and session_service: sql, or remove memory_url",
        ),
        (
            TRAVEL_CONFIG + "  memory_snapshot_url: redis://u:secret@h/0\n",
            "agent.memory_snapshot_url: there would be no working memory in Redis to snapshot; "
            "add memory_url",
        ),
        (
            TRAVEL_CONFIG + "  session_db_url: mysql://u:secret@h/d\n",
            "agent.session_db_url: MySQL is not supported; use postg",
        ),
        (
            TRAVEL_CONFIG + "  session_db_url: postgresql+psycopg://h/d\n",
            "the scheme 'postgresql+psycopg' is not supported",
        ),
        (
            TRAVEL_CONFIG + "  session_db_url: ['mysql://u:secret@h/d']\n",
            "agent.session_db_url: must be a valid string; meaning",
        ),
        (
            TRAVEL_CONFIG + "  session_db_url: meshpoint.db\n",
            "agent.session_db_url: is not a URL; ",
        ),
        (
            TRAVEL_CONFIG + "  session_db_url: 'sqlite://meshpoint.db'\n",
            "needs three slashes before its file; write sqlite:///m",
        ),
        (
            TRAVEL_CONFIG + "  session_db_url: 'sqlite://u:secret@/tasks.db'\n",
            "needs three slashes before its file; write sqlite:///meshpoint.db",
        ),
        (
            TRAVEL_CONFIG + "  session_db_url: 'sqlite:///:memory:'\n",
            "agent.session_db_url: does not name a file",
        ),
        (
            "mesh: {broker_url: 'kafka://u:secret@h'}\n",
            "mesh.broker_url: the scheme 'kafka' is not supported; use amqp",
        ),
        ("mesh: {broker_url: 'redis://u:secret@h'}\n", "mesh.broker_url: Redis is not supported"),
        (
            "mesh: {broker_url: 'sqlite:///a.db?mode=ro'}\n",
            "mesh.broker_url: takes no options after '?'",
        ),
        ("mesh: {namespace: a.b}\n", "mesh.namespace: 'a.b' is not a valid namespace"),
        (
            "mesh: {delivery_limit: 3}\n",
            "mesh.delivery_limit: must be greater than or equal to 10, not 3",
        ),
        (
            TRAVEL_CONFIG + "  operator_logins: ops\n",
            "agent.operator_logins: must be a list, not 'ops'",
        ),
        (
            TRAVEL_CONFIG + "  peer_logins: [ops]\n",
            "agent.peer_logins: must be a mapping, not ['ops']",
        ),
        (
            TRAVEL_CONFIG + "  lease_seconds: 0\n",
            "agent.lease_seconds: must be greater than 0, not 0",
        ),
        (TRAVEL_CONFIG + "  lease_seconds: .inf\n", "agent.lease_seconds: must be"),
        (
            TRAVEL_CONFIG + "  lease_seconds: 8\n",
            "agent.renew_interval_seconds: 5 s is too long for a lease of 8 s; use at most 4",
        ),
        (
            TRAVEL_CONFIG + "  max_message_bytes: 20000000\n",
            "agent.max_message_bytes: 20000000 is above mesh.max_message_bytes",
        ),
        (
            TRAVEL_CONFIG + "  begin_at_delivery: 20\n",
            "agent.begin_at_delivery: 20 is not below mesh.delivery_limit",
        ),
        *(
            (
                f"{mesh}{TRAVEL_CONFIG}  {logins}\n",
                f"agent.{logins.split(':')[0]}: only RabbitMQ verifies logins, but "
                "mesh.broker_url is another",
            )
            for mesh in (
                "",
                "mesh: {broker_url: 'sqlite:///q.db'}\n",
                "mesh: {broker_url: 'memory://'}\n",
            )
            for logins in ("peer_logins: {client: client}", "operator_logins: [ops]")
        ),
        ("agent: {name: a b, entrypoint: 'm:a'}\n", "agent.name: 'a b' is not a valid agent name"),
        ("agent: {name: a, entrypoint: m.a}\n", "agent.entrypoint: 'm.a' is not an entrypoint"),
        ("agent:\n", "agent: has no keys"),
        ("agents: {name: a}\n", "agents: is not a list"),
        ("agent:\n- {name: a, entrypoint: 'm:a'}\n", "agent: is a list; write 'agents:'"),
        ("agent: {}\nagents: []\n", "agent: is used together with agents"),
        ("- agent\n", "mesh.yaml: is not a mapping"),
        ("agent: [\n", "mesh.yaml: line 2, column 1: "),
        (
            "mesh: {namespace: a}\nmesh: {namespace: b}\n",
            "line 2, column 1: the key 'mesh' is repeated here",
        ),
    ],
)
def test_an_invalid_setting_is_refused_in_one_line(write: Write, content: str, said: str) -> None:
    line = refusal_line(write(content))
    assert said in line
    assert "secret" not in line


def test_the_section_of_a_list_is_named(write: Write) -> None:
    path = write(
        "agents:\n- {name: a, entrypoint: 'm:a'}\n"
        "- {name: b, entrypoint: 'm:b', lease_seconds: 8}\n"
    )
    assert refusal_line(path).startswith("agents[1].renew_interval_seconds: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal_line(tmp_path / "none.yaml").startswith(
        f"{tmp_path}/none.yaml: no such file or directory; "
    )


def hide_modules(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make `modules` appear not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name in modules else find_spec(name)
    )


def test_a_missing_driver_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_modules(monkeypatch, "asyncpg", "pamqp")
    url = "  session_service: sql\n  session_db_url: postgresql://h/d\n"
    line = refusal_line(write("mesh: {broker_url: 'memory://'}" + TRAVEL_CONFIG + url))
    assert line == (
        "agent.session_db_url: PostgreSQL needs the package asyncpg; "
        "run: pip install 'meshpoint[postgresql]'"
    )
    line = refusal_line(write("mesh: {broker_url: 'amqp://h/'}\n"))
    assert line == (
        "mesh.broker_url: RabbitMQ needs the package pamqp; run: pip install 'meshpoint[rabbitmq]'"
    )


def test_a_database_that_is_not_used_needs_no_driver(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_modules(monkeypatch, "asyncpg")
    content = (
        "mesh: {broker_url: 'memory://'}" + TRAVEL_CONFIG + "  session_db_url: postgresql://h/d\n"
    )
    assert load([write(content)], env={}).agents[0].session_service == "memory"


def test_anchors_can_be_defined_in_separate_keys(write: Write) -> None:
    path = write("""
x-shared: &shared
  entrypoint: m:a
  lease_seconds: 20
agents:
- {<<: *shared, name: a}
- {<<: *shared, name: b, lease_seconds: 30}
""")
    assert [agent.lease_seconds for agent in load([path], env={}).agents] == [20, 30]


YAML_BOMB = "x: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGED = "x: &a0 {k: 1, l: 2}\n" + "".join(
    f"x-{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


def nested_pairs(tag: str) -> str:
    """YAML whose `tag` lists expand to 100,000 values where a string is expected."""
    levels = [f"x-{n}: &a{n} {tag} [{', '.join([f'k: *a{n - 1}'] * 10)}]\n" for n in range(1, 6)]
    return "x-0: &a0 [x]\n" + "".join(levels) + "mesh: {namespace: *a5}\n"


def many_keys(count: int) -> str:
    return "{" + ", ".join(f"k{n}: 1" for n in range(count)) + "}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (nested_pairs("!!pairs"), "its aliases expand to more than"),
        (nested_pairs("!!omap"), "its aliases expand to more than"),
        (
            f"x: &s {'a' * 5000}\nmesh: {{namespace: [{'*s, ' * 5000}]}}\n",
            "its aliases expand to more than",
        ),
        (
            f"x: &a {{{'a' * 1000}: 1}}\nmesh: {{n: [{'{<<: *a}, ' * 10_000}]}}\n",
            "its aliases expand to more than",
        ),
        ("mesh: {namespace: 0x" + "f" * 5000 + "}\n", "has a value that cannot be read"),
        ("mesh: {namespace: 1" + ":1" * 400_000 + "}\n", "has a value that cannot be read"),
        ("? 0x" + "f" * 5000 + "\n: 1\n", "has a value that cannot be read"),
        ("mesh: {namespace: '${a," + " " * 200_000 + "'}\n", "without a variable name"),
        (YAML_BOMB, "its aliases expand to more than"),
        (MERGED, "its aliases expand to more than"),
        ("mesh: &a [*a]\n", "an alias contains itself"),
        ("mesh: " + "[" * 10_000, "is nested too deeply"),
        ("mesh: 2026-99-99\n", "has a value that cannot be read"),
        ("mesh: " + "9" * 10_000 + "\n", "has a value that cannot be read"),
    ],
    ids=[
        "pairs",
        "ordered",
        "texts",
        "long keys",
        "hexadecimal",
        "base 60",
        "key",
        "reference",
        "aliases",
        "merges",
        "recursion",
        "nesting",
        "date",
        "number",
    ],
)
def test_exploding_yaml_is_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=problem) as refused:
        load([path], env={})
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "merges",
    [
        f"x-b: {{<<: [{'*a, ' * 4000}]}}",
        "x-b: {" + ", ".join(f"!!merge m{n}: *a" for n in range(4000)) + "}",
        f"x-b: {{c: {{d: &b {{<<: *a}}}}}}\nx-e: {{<<: [{'*b, ' * 4000}]}}",
    ],
    ids=["list", "many keys", "merged later"],
)
def test_exploding_merges_are_refused_before_they_are_copied(tmp_path: Path, merges: str) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(f"x-a: &a {many_keys(2000)}\n{merges}\n")
    tracemalloc.start()
    with pytest.raises(ConfigurationError, match="its aliases expand to more than"):
        load([path], env={})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000


def test_one_mapping_can_be_merged_several_times(write: Write) -> None:
    path = write("""
x-shared: &shared {<<: &base {entrypoint: "m:a", lease_seconds: 20}, lease_seconds: 30}
x-base: *base
agents:
- {<<: [*shared, *base, *shared], name: a}
- {<<: [*base, *shared], name: b}
""")
    assert [agent.lease_seconds for agent in load([path], env={}).agents] == [30, 20]


def test_an_endless_configuration_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="/dev/zero: has more than 1 MiB"):
        load([Path("/dev/zero")], env={})


SECRET = "hunter2"


@pytest.mark.parametrize(
    "rest",
    [
        f"u:{SECRET}@h:99999/x",
        f"u:{SECRET}@h:abc/x",
        f"u:{SECRET}@h:-1/x",
        f"u:{SECRET}@h:0/x",
        f"u:{SECRET}@[::1/x",
        f"u:{SECRET}@..:1/x",
        f"u:{SECRET}@xn--:1/x",
        f"u:{SECRET}@{'a' * 300}/x",
        f"u:{SECRET}@a b/x",
        f"u:{SECRET}@a\nb/x",
        f"u:{SECRET}@h/{'x' * 5000}",
    ],
)
@pytest.mark.parametrize("key", ["mesh.broker_url", "agent.session_db_url"])
def test_a_malformed_url_is_one_line_without_its_password(key: str, rest: str) -> None:
    check, scheme = (
        (urls.broker_url, "amqp")
        if key == "mesh.broker_url"
        else (urls.database_url, "postgresql")
    )
    with pytest.raises(ConfigurationError, match=rf"^{key}: ") as refused:
        check(f"{scheme}://{rest}", key)
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["sqlite:////data/mesh.db", "sqlite+aiosqlite:////data/mesh.db?timeout=3"]
)
def test_an_absolute_path_is_unchanged(url: str) -> None:
    assert AgentSettings(name="a", entrypoint="m:a", session_db_url=url).session_db_url == url


def test_settings_made_in_code_are_checked_too() -> None:
    agent = AgentSettings(name="a", entrypoint="m:a")
    with pytest.raises(ConfigurationError, match="two agents are called 'a'"):
        Settings(agents=(agent, agent))


SQL: dict[str, Any] = {"stateless_checkpointing": True, "session_service": "sql"}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({**SQL, "checkpoint_ttl_seconds": 60}, "checkpoint_ttl_seconds"),
        (
            {**SQL, "checkpoint_ttl_seconds": 60, "tombstone_ttl_seconds": 61},
            "checkpoint_ttl_seconds",
        ),
        ({"checkpoint_cache_url": "redis://127.0.0.1/"}, "checkpoint_cache_url"),
        ({"history": True}, "history"),
    ],
)
def test_a_key_without_effect_is_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^agent\.{key}: "):
        AgentSettings(name="a", entrypoint="m:a", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"memory_url": "redis://127.0.0.1/"},
        {"checkpoint_cache_url": "redis://127.0.0.1/"},
        {"ack_policy": "on_receipt"},
    ],
)
def test_checkpointing_alone_can_be_switched_off(given: dict[str, Any]) -> None:
    """The other settings still apply to the tasks in the database."""
    settings = AgentSettings(
        name="a", entrypoint="m:a", **{**SQL, "stateless_checkpointing": False, **given}
    )
    assert settings.has_database
    assert not settings.options().stateless_checkpointing


@pytest.mark.parametrize(
    "given",
    [
        {"checkpoint_ttl_seconds": 60, "tombstone_ttl_seconds": 60},
        {"tombstone_ttl_seconds": 315_000_000},  # finished operations are kept as long
    ],
)
def test_checkpoints_can_be_kept_as_long_as_tombstones(given: dict[str, Any]) -> None:
    settings = AgentSettings(name="a", entrypoint="m:a", **SQL, **given)
    assert settings.tombstone_ttl_seconds == given["tombstone_ttl_seconds"]
