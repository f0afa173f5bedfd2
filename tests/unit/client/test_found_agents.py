"""Cards that answer one question: which are kept, and when they are complete."""

from __future__ import annotations

import asyncio
import json

import pytest

from idle_loop import advance_loop, idle
from meshpoint.client import found_agents
from meshpoint.client.found_agents import CardAnswers
from meshpoint.model.envelopes import card_message
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Message


def a_card(agent: str, replica: str = "r-1", second: int = 0, sender: str = "") -> Message:
    content = {
        "card": {"name": agent, "version": replica},
        "replica": replica,
        "startedAt": f"2026-01-02T03:04:0{second}Z",
    }
    return card_message(AgentName(sender or agent), json.dumps(content).encode())


def test_agents_are_sorted_and_the_card_of_the_last_replica_counts() -> None:
    answers = CardAnswers()
    for message in (
        a_card("hotels"),
        a_card("flights", "old", 1),
        a_card("flights", "new", 3),
        a_card("flights", "middle", 2),
        a_card("flights", "new", 3),
        a_card("trains", sender="flights"),
    ):
        answers.add(message)
    flights, hotels = answers.agents()
    assert [replica.id for replica in flights.replicas] == ["new", "middle", "old"]
    assert (flights.card.version, hotels.card.name) == ("new", "hotels")


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [a_card(f"agent-{number}") for number in range(5)]
    monkeypatch.setattr(found_agents, "_MAX_CARDS", 2)
    answers = CardAnswers()
    for card in cards:
        answers.add(card)
    assert len(answers.agents()) == 2
    monkeypatch.setattr(found_agents, "_MAX_CARDS", 20_000)
    monkeypatch.setattr(found_agents, "_MAX_BYTES", 3 * len(cards[0].body))
    answers = CardAnswers()
    for card in cards:
        answers.add(card)
    assert len(answers.agents()) == 3


async def test_answers_are_complete_after_a_silence_once_each_named_agent_has_answered() -> None:
    answers = CardAnswers()
    waiting = asyncio.ensure_future(answers.wait(60.0, ["flights", "hotels"]))
    for agent in ("flights", "hotels"):
        await idle()
        answers.add(a_card(agent))
        await idle()
        assert not waiting.done()
        advance_loop(1.0)
        await idle()
        assert waiting.done() == (agent == "hotels")
    await waiting


async def test_a_missing_agent_is_awaited_until_the_end() -> None:
    answers = CardAnswers()
    waiting = asyncio.ensure_future(answers.wait(60.0, ["flights"]))
    await idle()
    answers.add(a_card("hotels"))
    await idle()
    advance_loop(59.0)
    await idle()
    assert not waiting.done()
    advance_loop(2.0)
    await waiting
