"""Each page shows what the database has, masked and escaped."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from dashboard.client import Browser
from dashboard.scene import NAMESPACE, REPLICA, Scene, call, open_store, wait, write_config
from meshpoint.adapters.sql import SqlStore, operator_store
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.dashboard import Dashboard, LocalAccess
from meshpoint.dashboard.sources import load_sources
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.replicas import Registration
from meshpoint.model.timeline import TimelineOptions
from meshpoint.testing.conformance.build import answered, failed, paused

SHORT = f"{REPLICA[:8]}…{REPLICA[-8:]}"
PAGES = ("waiting", "questions", "failures", "agents", "audit", "tasks", "letters")


def text_of(html: str) -> str:
    """The words of a page, as people see them."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


async def test_the_first_page_shows_who_waits_for_whom(browser: Browser, scene: Scene) -> None:
    home = await browser.get("/")
    assert home.headers["location"] == f"/m/{NAMESPACE}/waiting"
    page = await browser.get(f"/m/{NAMESPACE}/waiting")
    text = text_of(page.text)
    assert "waiting 1 of 4" in text
    assert "waiting 0 of 2 needs 1" in text
    place = [page.text.index(word) for word in (scene.root, scene.child, "airline-a", "approval")]
    assert place == sorted(place)
    assert page.text.count(f'title="{scene.child}"') == 1, "a child is no root"
    assert "question approval" in text
    assert f"/question?id={scene.question.to_id()}" in page.text
    assert 'data-kind="left"' in page.text


async def test_the_tasks_of_an_agent_are_listed_even_if_others_wait_for_them(
    browser: Browser, scene: Scene
) -> None:
    page = await browser.get(f"/m/{NAMESPACE}/waiting", agent="flights")
    assert f'title="{scene.child}"' in page.text
    assert f'title="{scene.root}"' not in page.text


async def test_a_page_says_that_tasks_follow_for_which_no_other_waits(
    browser: Browser, store: SqlOperatorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_store, "_SCANNED", 1)
    monkeypatch.setattr(operator_store, "_MAX_SCANS", 1)
    page = await browser.get(f"/m/{NAMESPACE}/waiting")
    assert "The next page has more." in page.text
    monkeypatch.setattr(operator_store, "_MAX_SCANS", 20)
    page = await browser.get(f"/m/{NAMESPACE}/waiting")
    assert "The next page has more." not in page.text
    assert 'class="node"' in page.text


async def test_a_tree_crosses_the_databases_of_a_mesh(
    tmp_path: Path, store: SqlOperatorStore, config: Path
) -> None:
    hotels = call("hotels")
    parent = await wait(store, "travel", hotels)
    other = await open_store(f"sqlite:///{tmp_path}/hotels.db")
    await wait(
        other, "hotels", call("cleaning"), parent=parent.run.task_id, task_id=hotels.sub_task_id
    )
    await other.close()
    lines = config.read_text().replace(
        "{name: hotels, entrypoint: 'mod:hotels'}",
        f"{{name: hotels, entrypoint: 'mod:hotels', database_url: 'sqlite:///{tmp_path}/hotels.db'}}",
    )
    config.write_text(lines)
    app = Dashboard(config, access=LocalAccess("ada"))
    browser = Browser(app)
    page = await browser.get(f"/m/{NAMESPACE}/task", id=parent.run.task_id)
    assert "cleaning" in page.text
    assert f"/m/{NAMESPACE}-2/task?id={hotels.sub_task_id}" in page.text
    found = await browser.get("/find", id=hotels.sub_task_id)
    assert found.headers["location"] == f"/m/{NAMESPACE}-2/task?id={hotels.sub_task_id}"
    await app.aclose()


async def test_a_task_page_says_why_it_does_not_run(browser: Browser, scene: Scene) -> None:
    text = text_of((await browser.get(f"/m/{NAMESPACE}/task", id=scene.root)).text)
    assert "It waits for approval, flights, hotels." in text
    assert '"city": "Rome"' in text
    assert "4bf92f3577b34da6a3ce929d0e0e4736" in text
    parked = text_of((await browser.get(f"/m/{NAMESPACE}/task", id=scene.parked)).text)
    assert "No version that tried it could continue it: 2026.12." in parked
    assert "call 3: expected flights, recorded weather" in parked
    operation = text_of((await browser.get(f"/m/{NAMESPACE}/task", id=scene.operation)).text)
    assert "Checkpoints" in operation
    assert "fetch weigh write the price service does not answer" in operation


async def test_failures_are_grouped_by_what_their_reasons_have_in_common(
    browser: Browser, scene: Scene
) -> None:
    text = text_of((await browser.get(f"/m/{NAMESPACE}/failures")).text)
    assert re.search(
        r"4 travel Resume 4 .*? error: peer 'flights': no seat on flight \d+ since", text
    )
    assert re.search(
        r"3 travel Offer again 3 .*? call 3: expected flights, recorded weather", text
    )
    letters = text_of((await browser.get(f"/m/{NAMESPACE}/letters")).text)
    assert "2 travel from planner Replay" in letters
    body = text_of((await browser.get(f"/m/{NAMESPACE}/letter", id="travel:1")).text)
    assert '"city": "Rome"' in body


async def test_agents_show_versions_formats_and_queues(browser: Browser, scene: Scene) -> None:
    text = text_of((await browser.get(f"/m/{NAMESPACE}/agents")).text)
    assert "requests 0 · nested 0 · responses 0 · 0 consumers" in text
    assert "travel/1 2026.11 3" in text
    assert f"{SHORT} not registered 1 – –" in text


async def test_registered_replicas_are_shown(
    browser: Browser, store: SqlOperatorStore, scene: Scene
) -> None:
    for agent, slots in (("travel", 4), ("idle", 8)):
        await store.register(
            Registration(
                REPLICA,
                AgentName(agent),
                "1.2.3",
                "2026.11",
                frozenset({f"{agent}/1", f"{agent}/2"}),
                slots,
                "<b>host-7</b>",
                timedelta(minutes=1),
                is_draining=agent == "idle",
                pid=17 if agent == "idle" else None,
            )
        )
    text = text_of((await browser.get(f"/m/{NAMESPACE}/agents")).text)
    assert f"{SHORT} live <b>host-7</b> 2026.11 travel/1, travel/2 1 4 " in text
    assert f"{SHORT} draining <b>host-7</b> · 17 2026.11 idle/1, idle/2 0 8 " in text


async def test_a_task_shows_its_timeline(
    browser: Browser, config: Path, store: SqlOperatorStore
) -> None:
    recorded = SqlStore(
        f"sqlite:///{config.parent}/mesh.db",
        namespace=NAMESPACE,
        timeline=TimelineOptions(ReplicaId("A")),
    )
    await recorded.open()
    pause = await paused(recorded, "a", "b")
    await answered(recorded, pause, "a")
    await recorded.close()
    text = text_of((await browser.get(f"/m/{NAMESPACE}/task", id=pause.run.task_id)).text)
    assert re.search(r"0 ms paused 1 – A for 2 calls", text)
    assert re.search(r" ms answered 1 – A \S+, 1 of 2, task ", text)


@pytest.mark.parametrize(
    "state", ["waiting", "running", "parked", "failed", "completed", "cancelled"]
)
async def test_tasks_are_listed_by_state(browser: Browser, scene: Scene, state: str) -> None:
    page = await browser.get(f"/m/{NAMESPACE}/tasks", state=state)
    assert page.status_code == 200
    assert ("<tbody>" in page.text) == (state != "cancelled")


@pytest.mark.parametrize("name", PAGES)
async def test_no_page_shows_a_secret_or_runs_a_script(
    browser: Browser, scene: Scene, name: str
) -> None:
    pages = [await browser.get(f"/m/{NAMESPACE}/{name}", state="failed")]
    if name == "tasks":
        pages += [
            await browser.get(f"/m/{NAMESPACE}/task", id=each)
            for each in (scene.root, scene.failed, scene.hostile)
        ]
        pages.append(await browser.get(f"/m/{NAMESPACE}/letter", id="travel:1"))
    for page in pages:
        assert page.status_code == 200
        for secret in ("hunter", "swordfish", "k-123"):
            assert secret not in page.text
        assert "<script>alert" not in page.text
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert not re.search(
            r"<script(?! src=\"/static/)|\son\w+=|\sstyle=|javascript:", page.text
        )


async def test_a_list_shows_no_secret_of_a_subject(
    browser: Browser, store: SqlOperatorStore
) -> None:
    await failed(store, subject="invoice with api_key=hunter3")
    page = await browser.get(f"/m/{NAMESPACE}/tasks", state="failed")
    assert "invoice with api_key=***" in page.text


async def test_a_task_is_found_although_another_database_is_unavailable(
    tmp_path: Path, config: Path, scene: Scene
) -> None:
    (tmp_path / "gone").mkdir()
    app = Dashboard(write_config(tmp_path / "gone"), config, access=LocalAccess("ada"))
    found = await Browser(app).get("/find", id=scene.root)
    assert found.headers["location"] == f"/m/{NAMESPACE}-2/task?id={scene.root}"
    assert (await Browser(app).get("/find", id="nobody")).status_code == 503
    await app.aclose()


def test_databases_have_addresses_of_their_own(tmp_path: Path) -> None:
    for number, namespace in enumerate(("a", "a", "a-2")):
        (tmp_path / f"{number}.yaml").write_text(
            f"mesh: {{namespace: {namespace}, broker_url: 'memory://',"
            f" database_url: 'sqlite:///{tmp_path}/{number}.db'}}\n"
            "agent: {name: a, entrypoint: 'm:a'}\n"
        )
    sources = load_sources([tmp_path / f"{number}.yaml" for number in range(3)])
    assert len({each.key for each in sources}) == 3


async def test_only_a_browser_that_reads_has_a_stream(browser: Browser) -> None:
    page = await browser.http.head(f"/m/{NAMESPACE}/live/waiting")
    assert page.status_code == 405


async def test_a_hostile_task_has_a_page_of_its_own(browser: Browser, scene: Scene) -> None:
    page = await browser.get(f"/m/{NAMESPACE}/task", id=scene.hostile)
    assert scene.hostile in unescape(page.text)
    listed = (await browser.get(f"/m/{NAMESPACE}/waiting")).text
    (link,) = {each for each in re.findall(r'href="([^"]*)"', listed) if "passwd" in each}
    assert (await browser.get(unescape(link))).status_code == 200


async def test_pages_follow_each_other_without_gaps(
    store: SqlOperatorStore, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshpoint.dashboard import views

    monkeypatch.setattr(views, "_PAGE", 2)
    monkeypatch.setattr(views, "_LIST_PAGE", 2)
    for path, expected in (
        (f"/m/{NAMESPACE}/waiting", 5),
        (f"/m/{NAMESPACE}/questions", 5),
        (f"/m/{NAMESPACE}/tasks?state=failed", 6),
    ):
        seen: list[str] = []
        url: str | None = path
        while url:
            page = (await browser.get(url)).text
            rows = re.findall(
                r'<li class="card">|<tr>\s*<td>|^<li>\s*<div class="node">', page, re.M
            )
            names = re.findall(r'title="([^"]+)">', page.partition("<main")[2])
            seen += [each for each in dict.fromkeys(names) if " " not in each]
            assert len(rows) > 0
            found = re.search(r'href="([^"]+)" rel="next"', page)
            url = unescape(found[1]) if found else None
        assert len(set(seen)) >= expected, path


async def test_a_database_without_its_tables_is_reported(tmp_path: Path) -> None:
    app = Dashboard(write_config(tmp_path, name="other"), access=LocalAccess("ada"))
    page = await Browser(app).get(f"/m/{NAMESPACE}/waiting")
    assert page.status_code == 503
    assert "no replica has used the database file yet" in page.text
    assert (await Browser(app).get("/healthz")).status_code == 503


async def test_the_dashboard_is_healthy_when_its_databases_answer(make_browser: Any) -> None:
    from meshpoint.dashboard import TokenAccess, User
    from meshpoint.dashboard.access import Role

    browser = make_browser(TokenAccess({"x" * 20: User("ada", Role.VIEW)}))
    page = await browser.get("/healthz")
    assert (page.status_code, page.text) == (200, "ok\n")


def test_a_mesh_without_a_database_has_no_dashboard(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("mesh: {broker_url: 'memory://'}\nagent: {name: a, entrypoint: 'm:a'}\n")
    with pytest.raises(ConfigurationError, match="no agent in it has a database"):
        Dashboard(path, access=LocalAccess("ada"))


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/m/demo/nonsense", 404),
        ("/m/other/waiting", 404),
        ("/m/demo/task?id=nobody", 404),
        ("/m/demo/task?id=a%00b", 400),
        ("/m/demo/question?id=nonsense", 404),
        ("/m/demo/do/nonsense", 404),
        ("/m/demo/do/cancel?id=nobody", 404),
        ("/m/demo/letter?id=nonsense", 400),
        ("/m/demo/do/drop", 400),
        ("/m/demo/do/drop?agent=travel", 400),
        ("/m/demo/tasks?state=odd", 400),
        ("/m/demo/waiting?agent=a/b", 400),
        ("/m/demo/waiting?after_at=x&after_id=y", 400),
        ("/m/demo/waiting?after_at=nan&after_id=y", 200),
        ("/static/../app.py", 404),
        ("/static/%2e%2e/app.py", 404),
        ("/static/..%2fapp.py", 404),
        ("/static//etc/passwd", 404),
        ("/m/demo/..%2f..%2fetc", 404),
        ("/nonsense", 404),
    ],
)
async def test_an_odd_address_is_refused(browser: Browser, path: str, status: int) -> None:
    page = await browser.get(path)
    assert page.status_code == status
    assert "Traceback" not in page.text
    assert "def " not in page.text
