"""What `meshpoint doctor` says about keys."""

from __future__ import annotations

import base64

import pytest

from meshpoint.doctor.encryption_checks import check_encryption
from meshpoint.doctor.facts import BrokerAgentFacts, DatabaseFacts, Facts, Release
from meshpoint.model.ids import AgentName
from meshpoint.ports.inspection import AgentTasks
from meshpoint.settings import AgentSettings, MeshSettings, Settings
from meshpoint.wiring import make_sealer

OLD, NEW = (base64.b64encode(each * 32).decode() for each in (b"o", b"n"))


def facts_with(*keys: str, used: tuple[str, ...] = (), replicas: int = 0) -> Facts:
    agent = AgentSettings(
        name="travel", entrypoint="m:a", database_url="sqlite:///x.db", encryption_keys=keys
    )
    release = Release(agent, frozenset(), "travel/1", "1", "1")
    facts = Facts(Settings(mesh=MeshSettings(), agents=(agent,)), [release])
    tasks = {release.name: AgentTasks(key_ids=tuple(map(key_id, used)))}
    facts.databases = {agent.session_db_url: DatabaseFacts("sqlite:///x.db", tasks=tasks)}
    facts.broker = {AgentName("travel"): BrokerAgentFacts(is_declared=True, replicas=replicas)}
    return facts


def key_id(key: str) -> str:
    agent = AgentSettings(name="a", entrypoint="m:a", encryption_keys=(key,))
    sealer = make_sealer(agent.key_ring, "encryption_keys")
    assert sealer is not None
    return str(sealer.key_id())


@pytest.mark.parametrize(
    ("keys", "used", "replicas", "expected"),
    [
        ((), (), 1, []),
        ((), (OLD,), 0, ["keys.missing"]),
        ((NEW,), (OLD,), 0, ["keys.missing", "keys.used"]),
        ((NEW, OLD), (OLD,), 2, ["keys.new", "keys.used"]),
        ((OLD, NEW), (OLD,), 2, ["keys.used"]),
        (("clear", NEW), (), 2, ["keys.used"]),
    ],
)
def test_keys_in_use_missing_and_new(
    keys: tuple[str, ...], used: tuple[str, ...], replicas: int, expected: list[str]
) -> None:
    findings = check_encryption(facts_with(*keys, used=used, replicas=replicas))
    assert [each.check for each in findings] == expected
    shown = " ".join(f"{each.problem} {each.fix}" for each in findings)
    assert OLD not in shown
    assert all(key_id(key) in shown for key in used)
