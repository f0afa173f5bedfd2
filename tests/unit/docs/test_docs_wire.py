"""The wire reference matches the code: its examples parse, and it is complete."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic.alias_generators import to_camel

from meshpoint.adapters.rabbitmq.topology import Topology
from meshpoint.engine import parsing
from meshpoint.model.bodies import (
    AttachBody,
    Body,
    CancelBody,
    CompleteBody,
    DenyBody,
    ReadBody,
    RequestBody,
    ResponseBody,
    SignalBody,
    StatusBody,
    parse_body,
)
from meshpoint.model.cards import CardBody, parse_card
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import (
    MAX_NAME_BYTES,
    Address,
    AttachStatus,
    Header,
    Message,
    MessageType,
    dead_letter_queue,
)
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import QuestionKey
from meshpoint.settings import MeshSettings

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())  # independent of line breaks
BODIES: dict[str, type[Body]] = {
    "request": RequestBody,
    "response": ResponseBody,
    "status": StatusBody,
    "cancel": CancelBody,
    "attach": AttachBody,
    "complete": CompleteBody,
    "signal": SignalBody,
    "read": ReadBody,
    "card": CardBody,
    "deny": DenyBody,
}
TASK = "01941f29-7c00-7000-8000-000000000002"


def sections(level: str) -> dict[str, str]:
    """The text under each heading of a level."""
    _, *parts = re.split(rf"^{level} ", PAGE, flags=re.MULTILINE)
    return {
        part.partition("\n")[0]: re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in parts
    }


def json_examples(section: str) -> list[bytes]:
    return [block.encode() for block in re.findall(r"```json\n(.*?)```", section, flags=re.DOTALL)]


EXAMPLES = [
    pytest.param(name, body, id=f"{name}-{number}")
    for name, section in sections("###").items()
    for number, body in enumerate(json_examples(section), 1)
]


def create_message(kind: str, body: bytes) -> Message:
    headers = {Header.PARENT_TASK.value: "parent"}
    return Message(
        MessageType(kind), body, f"{TASK}.message", TASK, "flights", headers=dict(headers)
    )


def table_rows(section: str) -> dict[str, str]:
    """The first two cells of each row in a section's tables."""
    found = re.findall(r"^\| (.+?) \| (.+?) \|", sections("##")[section], flags=re.MULTILINE)
    return {name.strip("`"): cells for name, cells in found}


def test_every_json_block_is_an_example_of_a_body() -> None:
    assert len(EXAMPLES) == PAGE.count("```") // 2
    assert {str(example.values[0]) for example in EXAMPLES} == set(BODIES)


@pytest.mark.parametrize(("name", "body"), EXAMPLES)
def test_every_documented_example_is_parsed(name: str, body: bytes) -> None:
    read = parse_body(BODIES[name], body)
    assert_nothing_is_ignored(json.loads(body), json.loads(read.to_bytes()))


def assert_nothing_is_ignored(written: object, read: object) -> None:
    """Unknown fields are ignored, so a misspelt field of an example would otherwise pass."""
    if isinstance(written, dict):
        assert isinstance(read, dict)
        for key, value in written.items():
            assert key in read
            assert_nothing_is_ignored(value, read[key])
    elif isinstance(written, list):
        assert isinstance(read, list)
        assert len(written) == len(read)
        for first_item, second_item in zip(written, read, strict=True):
            assert_nothing_is_ignored(first_item, second_item)
    else:
        assert written == read


@pytest.mark.parametrize(("name", "body"), EXAMPLES)
def test_a_worker_accepts_every_documented_example(name: str, body: bytes) -> None:
    options, arrived = Options(), create_message(name, body)
    match name:
        case "request":
            read = parsing.parse_request(arrived, options)
            assert read.input == {"from": "Oslo", "to": "Rome"}
            assert (read.a2a_context.user_id, read.a2a_context.session_id) == ("ada", "s-1")
            assert read.security_context == {"scopes": ["travel:read"]}
            assert read.a2a_context.metadata == {"team": "blue"}
        case "response":
            assert parsing.parse_claim(arrived, options).outcome
        case "status":
            status = parsing.parse_status(arrived, options)
            assert status.content == {"percent": 40}
            assert status.metadata.path == ("flights", "flights", "seats")
            assert status.metadata.number is not None
            assert status.metadata.number.position == 2
        case "cancel":
            assert parsing.parse_cancel(arrived, options) == (
                TASK,
                "parent",
                "the traveller has changed her mind",
            )
        case "attach":
            arrived = replace(arrived, reply_to=Address("flights.resp"))
            assert parsing.parse_attach(arrived, options) == (TASK, "flights.resp")
        case "complete":
            answer = parse_body(CompleteBody, body)
            key = QuestionKey.from_id(answer.question or answer.rejects or "")
            assert key == ("purchasing", "order-17", "~?approval.1")
        case "signal":
            signal = parse_body(SignalBody, body)
            assert (signal.id, signal.signal, signal.signal_id) == ("order-17", "chat", "17-2")
            assert signal.value == {"text": "make it two"}
        case "read":
            value = parse_body(ReadBody, body)
            assert (value.id, value.key) == ("order-17", "progress")
        case "deny":
            denial = parse_body(DenyBody, body)
            assert denial.consumers == {"travel.req": 1, "travel.nested": 1}
        case "card":
            described = parse_card(body, "flights")
            assert (described.card.version, described.app_version) == ("2", "2026.1")
        case _:
            raise AssertionError(name)


def test_the_example_responses_cover_every_final_state() -> None:
    outcomes = [
        parse_body(ResponseBody, body).outcome()
        for body in json_examples(sections("###")["response"])
    ]
    ok, failed, cancelled = outcomes
    assert isinstance(ok, Ok)
    assert ok.value == {"flight": "MP101", "price": 120}
    assert ok.usage.total.input == 900
    assert ok.artifacts
    assert failed == Failed(FailureKind.ERROR, "no seat is left")
    assert cancelled == Failed(FailureKind.CANCELLED, "cancelled on request")


@pytest.mark.parametrize(
    "kind", [kind for kind in FailureKind if kind is not FailureKind.CANCELLED]
)
def test_every_kind_of_failure_is_named(kind: FailureKind) -> None:
    assert f"`{kind.value}`" in sections("###")["response"]


@pytest.mark.parametrize("header", Header)
def test_every_header_is_described(header: Header) -> None:
    assert table_rows("Headers")[header.value]


def test_every_documented_header_exists() -> None:
    assert set(table_rows("Headers")) - {"Header", "---"} == {header.value for header in Header}


@pytest.mark.parametrize("kind", MessageType)
def test_every_type_is_described(kind: MessageType) -> None:
    assert f"`{kind.value}`" in table_rows("Properties")["type"]
    assert kind is MessageType.WAKE or kind.value in sections("###")


@pytest.mark.parametrize("status", AttachStatus)
def test_every_status_of_an_attach_is_described(status: AttachStatus) -> None:
    assert f"| `{status.value}` |" in sections("###")["attach"]


def test_documented_message_ids_match_the_envelopes() -> None:
    ids = table_rows("Properties")
    assert ids["request"] == "the task id"
    assert ids["response"] == "the task id and `.reply`"
    assert ids["cancel"] == "the task id and `.cancel`"
    assert cancel_message(AgentName("travel"), TaskId(TASK)).message_id == f"{TASK}.cancel"


def test_documented_queues_match_the_declared_ones() -> None:
    mesh = MeshSettings(namespace="demo")
    topology = Topology(mesh.namespace, mesh.private_queue_ttl, mesh.delivery_limit, None)
    agent, described = AgentName("travel"), table_rows("Exchange and queues")
    assert f"`{topology.exchange}`" in TEXT
    assert topology.private_ttl == timedelta(hours=1)
    for address, arguments in topology.queues(agent).items():
        assert topology.queue_name(address) in described
        row = ".dlq" if address == dead_letter_queue(agent) else ".req`, `.nested`, `.resp"
        assert parse_arguments(described[row]) == {
            key: str(value) for key, value in arguments.items()
        }
    assert parse_arguments(described[".private.<id>"]) == {
        k: str(v) for k, v in topology.private_queue_arguments().items()
    }
    assert dead_letter_queue(agent) in described[topology.queue_name(dead_letter_queue(agent))]
    assert f"`{topology.broadcast_key(agent)}`" in described["demo.travel.private.<id>"]


def parse_arguments(cell: str) -> dict[str, str]:
    return dict(re.findall(r"`(x-[a-z-]+): (\S+)`", cell))


def test_documented_limits_match_the_code() -> None:
    options = Options()
    assert f"({options.max_message_bytes:,})" in TEXT
    assert f"`max_call_depth` ({options.max_call_depth})" in TEXT
    assert "at its eighth delivery" in TEXT
    assert options.begin_at_delivery + options.max_attempts == 8
    assert f"for {options.reply_retry_time.total_seconds():g} s" in TEXT
    assert f"more than {MeshSettings().delivery_limit} times" in TEXT
    assert f"{MAX_NAME_BYTES} bytes" in TEXT


def test_documented_fields_exist_in_the_bodies() -> None:
    for name in ("message_id", "context_id", "task_id"):
        assert f"`{to_camel(name)}`" in sections("###")["request"]
