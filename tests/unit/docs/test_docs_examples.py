"""The page of examples runs as written."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

import meshpoint
from code_blocks import code_blocks
from meshpoint import Peer, TaskFailed
from meshpoint.testing import TestMesh, crash_matrix  # noqa: F401  # used by the page

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "examples.md"
APPROVAL, RETRIES, TIME, CRASHES = code_blocks(PAGE.read_text(encoding="utf-8"), "python")


class Order(BaseModel):
    id: str = "1"
    item: str = "milk"
    manager: str = "ada@shop.example"


class Decision(BaseModel):
    approved: bool
    comment: str = ""


class Receipt(BaseModel):
    text: str


class Query(BaseModel):
    item: str


class Quote(BaseModel):
    price: int


class Stock(BaseModel):
    shelf: str


class Invoice(BaseModel):
    receipt: str
    shelf: str


class Example(SimpleNamespace):
    """Execute a code block with these names, and return the names that it defines."""

    def __init__(self, block: str, **given: Any) -> None:
        public = {name: getattr(meshpoint, name) for name in meshpoint.__all__}
        names = {**public, **globals(), **given, "__name__": "examples"}
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
        super().__init__(**names)


@pytest.fixture
def sent() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def approval(sent: list[tuple[str, str]]) -> Example:
    async def mail(to: str, text: str) -> None:
        sent.append((to, text))

    return Example(APPROVAL, mail=mail, supplier=Peer("supplier", Order, Receipt))


async def test_an_answer_after_two_reminders(
    approval: Example, sent: list[tuple[str, str]]
) -> None:
    async with TestMesh(approval.purchasing, auto_advance=False) as mesh:
        mesh.stub(approval.supplier).returns(Receipt(text="bought"))
        task = await mesh.send(approval.purchasing, Order())
        await mesh.advance(timedelta(days=2, hours=1))
        question_id = sent[0][1].rpartition("/")[2]
        assert [text for _, text in sent[1:]] == ["Reminder 1", "Reminder 2"]
        await mesh.complete(question_id, Decision(approved=True))
        assert await task.result() == Receipt(text="bought")


async def test_without_a_decision_the_task_fails(
    approval: Example, sent: list[tuple[str, str]]
) -> None:
    async with TestMesh(approval.purchasing) as mesh:
        task = await mesh.send(approval.purchasing, Order())
        await mesh.advance(timedelta(days=4))
        with pytest.raises(TaskFailed, match="nobody decided within three days"):
            await task.result()
    assert [text for _, text in sent[1:]] == ["Reminder 1", "Reminder 2", "Reminder 3"]


@pytest.mark.parametrize("approved", [True, False])
async def test_a_manager_decides(approval: Example, approved: bool) -> None:
    async with TestMesh(approval.purchasing, auto_advance=False) as mesh:
        mesh.stub(approval.supplier).returns(Receipt(text="bought"))
        task = await mesh.send(approval.purchasing, Order())
        await mesh.advance(timedelta(hours=1))
        await task.complete(approval.approval, Decision(approved=approved, comment="no money"))
        if approved:
            assert await task.result() == Receipt(text="bought")
        else:
            with pytest.raises(TaskFailed, match="refused: no money"):
                await task.result()


async def test_retries() -> None:
    answers: Any = iter(
        [
            SimpleNamespace(status_code=429, headers={"retry-after": "30"}),
            SimpleNamespace(status_code=200, headers={}, content=b'{"price": 5}'),
            SimpleNamespace(status_code=404, headers={}),
        ]
    )

    class Http:
        async def get(self, path: str) -> Any:
            assert path == "/prices/milk"
            return next(answers)

    example = Example(RETRIES, http=Http())
    async with TestMesh(example.buyer, example.serve) as mesh:
        assert await mesh.call(example.buyer, "milk") == "5 EUR"
        with pytest.raises(TaskFailed, match="no item 'milk'"):
            await mesh.call(example.buyer, "milk")
    assert next(answers, None) is None


async def test_time() -> None:
    await Example(TIME, survey=Peer("survey", str, str)).test_survey_after_three_days()


async def test_crashes() -> None:
    charged = Counter[str]()

    async def charge(order: Order) -> str:
        charged[order.id] += 1
        return f"receipt {order.id}"

    warehouse = Peer("warehouse", Order, Stock)
    example = Example(CRASHES, charge=charge, charged=charged, warehouse=warehouse)
    await example.test_crash_after_the_charge()
    await example.test_every_crash_leaves_one_invoice()
