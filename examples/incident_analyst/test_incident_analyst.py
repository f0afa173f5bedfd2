"""Tests of the analyst in virtual time: days pass in milliseconds, and no server is needed."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import peers
import pytest
import service
from analyst import analyst
from httpx import ASGITransport, AsyncClient
from incident import Decision, Finding, Incident, approval, ask_logs, ask_metrics

from meshpoint import TaskTimeout
from meshpoint.testing import CrashPoint, TestMesh

AGENTS = (analyst, peers.changes, peers.owners, peers.critic)
INCIDENT = Incident(id="42", service="checkout", summary="Checkout is slow")
DAY = timedelta(days=1)


def play_peers(mesh: TestMesh) -> None:
    """The logs answer immediately, the metrics at the third attempt."""
    mesh.stub(ask_logs).returns(Finding(source="logs", text="out of connections"))
    metrics = mesh.stub(ask_metrics).returns(Finding(source="metrics", text="slow"))
    metrics.fails("error", "overloaded", times=2)


async def test_the_follow_up_comes_three_days_after_the_approval() -> None:
    async with TestMesh(*AGENTS) as mesh:
        play_peers(mesh)
        task = await mesh.send(analyst, INCIDENT)
        await mesh.advance(2.5 * DAY)
        approved_at = mesh.now()
        await task.complete(approval, Decision(approved=True, by="ada"))
        report = await task.result()
        assert 3 * DAY <= mesh.now() - approved_at < 3 * DAY + timedelta(minutes=1)
    assert (report.reminders, report.follow_up) == (2, "slow")
    assert report.timeline[-3:] == ["approved by ada", "rolled back", "followed up"]


async def test_a_refusal_changes_nothing() -> None:
    async with TestMesh(*AGENTS) as mesh:
        play_peers(mesh)
        task = await mesh.send(analyst, INCIDENT)
        await mesh.advance(1)
        await task.complete(approval, Decision(approved=False, by="ada"))
        report = await task.result()
    assert report.timeline[-1] == "refused by ada"


async def test_nobody_decides_within_a_week() -> None:
    async with TestMesh(*AGENTS) as mesh:
        play_peers(mesh)
        sent_at = mesh.now()
        task = await mesh.send(analyst, INCIDENT, timeout=7 * DAY)
        with pytest.raises(TaskTimeout):
            await task.result()
        assert 7 * DAY <= mesh.now() - sent_at < 7 * DAY + timedelta(minutes=1)


@pytest.mark.parametrize("point", ["step", "record", "checkpoint", "response", "resume"])
async def test_replicas_die_on_the_way(point: CrashPoint) -> None:
    async with TestMesh(*AGENTS) as mesh:
        play_peers(mesh)
        mesh.crash(after=point, times=4)
        task = await mesh.send(analyst, INCIDENT)
        await mesh.advance(2.5 * DAY)
        await task.complete(approval, Decision(approved=True, by="ada"))
        report = await task.result()
    assert report.timeline == [
        "investigating",
        *(f"objection: {objection}" for objection in peers.OBJECTIONS),
        "approved by ada",
        "rolled back",
        "followed up",
    ]


@pytest.mark.parametrize("id", ["a%0ab", "x" * 300])
async def test_the_service_refuses_what_is_no_id(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client must not repeat such a request, as it may after a 503."""
    overrides = service.app.dependency_overrides
    monkeypatch.setitem(overrides, service.get_mesh, lambda: None)
    transport = ASGITransport(service.app)
    async with AsyncClient(transport=transport, base_url="http://service") as client:
        read = await client.get(f"/incidents/{id}")
        updates = await client.get(f"/incidents/{id}/updates")
        decision = {"approved": True, "by": "ada"}
        decided = await client.post(f"/incidents/{id}/decision", json=decision)
    assert [each.status_code for each in (read, updates, decided)] == [422, 422, 422]


async def test_unknown_incidents_displace_no_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_FOLLOWED", 2)
    async with TestMesh(*AGENTS) as mesh:
        play_peers(mesh)
        for id in ("41", "42", "43"):
            incident = Incident(id=id, service="checkout", summary="Checkout is slow")
            await mesh.send(analyst, incident, task_id=service.task_id(id))
            await mesh.advance(1)
            event = await anext(aiter(service.updates(id, mesh, None)))
            assert event.event != "not_found"
        unknown = asyncio.ensure_future(anext(aiter(service.updates("nobody", mesh, None))))
        await mesh.advance(1)
        assert list(service.followed) == ["incident-42", "incident-43"]
        unknown.cancel()
