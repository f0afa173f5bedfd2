"""Checkpoints written by earlier versions stay readable forever. Add files here; change none."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from meshpoint.model.secrets import Secret
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskStatus
from meshpoint.subtasks.deliverable import DeliverableCodec
from meshpoint.subtasks.migrating import migrate_checkpoint, migrates, validate_migrations

FILES = sorted((Path(__file__).parent / "checkpoints").glob("*.json"))


@migrates("1.0", "1.1")
def parsing_any_filing(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """10-Qs are parsed too: the subtask is renamed, statements get a currency and hide a token."""
    for names in (checkpoint["completed_subtasks"], checkpoint["pending_subtasks"]):
        names[:] = ["filing_parsing" if name == "10k_parsing" else name for name in names]
    if (statement := checkpoint["interim_results"].pop("10k_parsing", None)) is not None:
        access = {"token": statement.pop("vault_token")}
        checkpoint["interim_results"]["filing_parsing"] = statement | {
            "currency": "USD",
            "access": access,
        }
    return checkpoint


@migrates("1.1", "1.2")
def ratios_by_name(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Ratios become a dict, peers are compared before the report, and half-done ratios restart."""
    results = checkpoint["interim_results"]
    if "ratio_calculation" in results:
        results["ratio_calculation"] = dict(results["ratio_calculation"])
    checkpoint["saved_progress"].pop("ratio_calculation", None)
    report = checkpoint["pending_subtasks"].index("report")
    checkpoint["pending_subtasks"].insert(report, "peer_comparison")
    return checkpoint | {"agent_config": checkpoint["agent_config"] | {"peers": 5}}


MIGRATIONS = validate_migrations([ratios_by_name, parsing_any_filing])


class Access(BaseModel):
    token: Annotated[str, Secret]


class Statement(BaseModel):
    company: str
    revenue: int
    net_income: float
    filed: date
    currency: str
    access: Access


def parse() -> Statement:
    raise AssertionError("recorded, so it must not run")


def calculate() -> dict[str, float]:
    raise AssertionError("recorded, so it must not run")


def read(name: str) -> AgentCheckpoint:
    [path] = [path for path in FILES if path.stem == name]
    return AgentCheckpoint.model_validate_json(path.read_bytes())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_read_and_written_without_loss(path: Path) -> None:
    checkpoint = AgentCheckpoint.model_validate_json(path.read_bytes())
    assert AgentCheckpoint.model_validate_json(checkpoint.model_dump_json()) == checkpoint
    assert migrate_checkpoint(checkpoint, checkpoint.agent_version, MIGRATIONS) is checkpoint


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_reaches_the_newest_version(path: Path) -> None:
    checkpoint = AgentCheckpoint.model_validate_json(path.read_bytes())
    assert migrate_checkpoint(checkpoint, "1.2", MIGRATIONS).agent_version == "1.2"


def test_a_failed_operation_continues_under_1_1() -> None:
    after = migrate_checkpoint(read("analyst_1.0_failed_in_ratios"), "1.1", MIGRATIONS)
    assert after.progress.completed == ("filing_parsing",)
    assert after.progress.pending == ("ratio_calculation", "report")
    assert after.saved_progress == {"ratio_calculation": '{"done": ["liquidity"], "row": 118}'}
    parsed, ratios = after.subtasks
    assert (parsed.function, parsed.inputs, parsed.secrets) == (None, {}, ("/access/token",))
    assert parsed.context == '{"flags": {"parsed": true}}'
    assert (ratios.status, ratios.function) == (SubtaskStatus.FAILED, "v:3")
    assert DeliverableCodec.for_function(parse).read(parsed.result or "") == Statement(
        company="Acme Steel & Söhne",
        revenue=81_462_000_000,
        net_income=-1.25e9,
        filed=date(2024, 2, 21),
        currency="USD",
        access=Access(token="vt-5150"),
    )


def test_a_failed_operation_continues_under_1_2() -> None:
    after = migrate_checkpoint(read("analyst_1.0_failed_in_ratios"), "1.2", MIGRATIONS)
    assert after.progress.pending == ("ratio_calculation", "peer_comparison", "report")
    assert after.saved_progress == {}
    assert after.agent_config == {
        "type": "analysis",
        "exclusive": False,
        "preserve": False,
        "peers": 5,
    }
    assert after.failure_reason == "ZeroDivisionError: division by zero"


def test_a_cancelled_operation_has_both_results_under_1_2() -> None:
    after = migrate_checkpoint(read("analyst_1.0_cancelled_before_report"), "1.2", MIGRATIONS)
    assert after.progress.completed == ("filing_parsing", "ratio_calculation")
    assert after.progress.pending == ("peer_comparison", "report")
    _, ratios = after.subtasks
    assert DeliverableCodec.for_function(calculate).read(ratios.result or "") == {
        "current": 1.8,
        "net_margin": -0.0153,
    }
    assert (ratios.function, ratios.retry, ratios.generation, ratios.seconds) == (
        None,
        1,
        2,
        61.04,
    )
    assert ratios.inputs == {"statement": "9f86d081884c7d659a2feaa0c55ad015"}
    assert ratios.context == '{"token_usage": {"input_tokens": 1200, "output_tokens": 80}}'
