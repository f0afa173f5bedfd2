"""What is refused: wrong tokens, roles, forms, hosts and sites."""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Any

import pytest

from dashboard.client import Browser
from dashboard.scene import NAMESPACE, Scene
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.dashboard import LocalAccess, ProxyAccess, Role, TokenAccess, User, access
from meshpoint.dashboard.guard import TOKEN_FIELD
from meshpoint.errors import ConfigurationError

MESH = f"/m/{NAMESPACE}"
ADA, BOB = "a" * 32, "b" * 32
PAGES = ("/", f"{MESH}/waiting", f"{MESH}/live/waiting", f"{MESH}/audit", "/find?id=x")


def tokens(**options: Any) -> TokenAccess:
    return TokenAccess.from_text(f"ada operate {ADA}\n# one more\nbob view {BOB}\n", **options)


async def log_in(browser: Browser, token: str) -> Any:
    return await browser.submit("/login", {"token": token})


async def count_actions(store: SqlOperatorStore) -> int:
    return len((await store.actions(limit=10)).items)


@pytest.mark.parametrize("path", PAGES)
async def test_without_a_session_every_page_asks_for_a_token(make_browser: Any, path: str) -> None:
    page = await make_browser(tokens()).get(path)
    assert page.status_code == 303
    assert page.headers["location"].startswith("/login?next=%2F")


async def test_a_token_begins_a_session(make_browser: Any, scene: Scene) -> None:
    browser = make_browser(tokens())
    done = await browser.submit(
        "/login", {"token": f" {ADA}\n"}, next=f"{MESH}/task?id={scene.root}"
    )
    assert done.headers["location"] == f"{MESH}/task?id={scene.root}"
    cookie = next(
        each
        for each in done.headers.get_list("set-cookie")
        if each.startswith(access.SESSION_COOKIE)
    )
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert ADA not in cookie
    page = await browser.get(f"{MESH}/waiting")
    assert "Log out" in page.text
    await browser.submit(f"{MESH}/waiting")  # its only form is the one for /logout
    left = await browser.http.post("/logout", data={TOKEN_FIELD: "x"})
    assert left.status_code == 403


async def test_a_wrong_token_begins_none(make_browser: Any) -> None:
    browser = make_browser(tokens())
    refused = await log_in(browser, "c" * 32)
    assert refused.status_code == 403
    assert (await browser.get(f"{MESH}/waiting")).status_code == 303


@pytest.mark.parametrize(
    "next_page", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:1"]
)
async def test_a_login_leads_to_no_other_site(make_browser: Any, next_page: str) -> None:
    done = await make_browser(tokens()).submit("/login", {"token": ADA}, next=next_page)
    assert done.headers["location"] == "/"


async def test_cookies_go_by_https_only_if_browsers_use_it(make_browser: Any) -> None:
    browser = make_browser(tokens(), secure=True)
    done = await log_in(browser, ADA)
    page = await browser.get("/login")
    assert all("Secure" in each for each in page.headers.get_list("set-cookie"))
    assert "max-age" in page.headers["strict-transport-security"]
    assert done.status_code == 403  # the cookie of the form was not sent by http


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value[:-1] + ("0" if value[-1] != "0" else "1"),
        lambda value: value.replace(value.split(".")[1], "9999999999"),
        lambda value: f"Ym9i.{value.partition('.')[2]}",
        lambda value: "..",
        lambda value: "é.1.x",
    ],
    ids=["mac", "expiry", "name", "empty", "odd"],
)
async def test_a_changed_session_is_none(change: Any) -> None:
    known = tokens()
    logged_in = known.log_in(ADA)
    assert logged_in is not None

    def user_with(cookie: str) -> User | None:
        from starlette.requests import HTTPConnection

        header = f"{access.SESSION_COOKIE}={cookie}".encode()
        return known.identify(HTTPConnection({"type": "http", "headers": [(b"cookie", header)]}))

    assert user_with(logged_in[1]) == User("ada", Role.OPERATE)
    assert user_with(change(logged_in[1])) is None


def test_a_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.requests import HTTPConnection

    known = tokens()
    logged_in = known.log_in(ADA)
    assert logged_in is not None
    header = f"{access.SESSION_COOKIE}={logged_in[1]}".encode()
    connection = HTTPConnection({"type": "http", "headers": [(b"cookie", header)]})
    assert tokens().identify(connection) is not None, "another process with the same tokens"
    assert TokenAccess.from_text(f"ada operate {BOB}").identify(connection) is None
    assert tokens(read_only=True).identify(connection) is None, "the role has changed"
    now = time()
    monkeypatch.setattr(access, "time", lambda: now + access.SESSION_SECONDS + 1)
    assert known.identify(connection) is None


async def test_a_viewer_changes_nothing(
    make_browser: Any, scene: Scene, store: SqlOperatorStore
) -> None:
    browser = make_browser(tokens())
    await log_in(browser, BOB)
    page = await browser.get(f"{MESH}/waiting")
    found = page.text.partition(f'name="{TOKEN_FIELD}" value="')[2].partition('"')[0]
    for action, query in (
        ("do/cancel", f"id={scene.root}"),
        ("do/drop", "id=travel:1"),
        ("question", f"id={scene.question.to_id()}"),
    ):
        refused = await browser.http.post(f"{MESH}/{action}?{query}", data={TOKEN_FIELD: found})
        assert refused.status_code == 403
        assert "you may only view" in refused.text
    assert await count_actions(store) == 0


@pytest.mark.parametrize("token", [None, "", "0" * 64, "é"])
async def test_a_form_without_its_token_changes_nothing(
    browser: Browser, scene: Scene, store: SqlOperatorStore, token: str | None
) -> None:
    await browser.get("/m/demo/waiting")
    data = {} if token is None else {TOKEN_FIELD: token}
    refused = await browser.http.post(f"{MESH}/do/cancel?id={scene.root}", data=data)
    assert refused.status_code == 403
    assert "the form has expired" in refused.text
    assert await count_actions(store) == 0


async def test_the_token_of_another_browser_does_not_count(
    make_browser: Any, scene: Scene
) -> None:
    known = LocalAccess("ada")
    mine, other = make_browser(known), make_browser(known)
    page = await other.get(f"{MESH}/do/cancel", id=scene.root)
    found = page.text.rpartition(f'name="{TOKEN_FIELD}" value="')[2].partition('"')[0]
    await mine.get(f"{MESH}/waiting")
    refused = await mine.http.post(f"{MESH}/do/cancel?id={scene.root}", data={TOKEN_FIELD: found})
    assert refused.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
async def test_a_form_from_another_site_changes_nothing(
    browser: Browser, scene: Scene, store: SqlOperatorStore, headers: dict[str, str]
) -> None:
    browser.http.headers.update(headers)
    refused = await browser.submit(f"{MESH}/do/suspend", id=scene.root)
    assert refused.status_code == 403
    assert refused.text == "this form was sent by another site"
    browser.http.headers.update(
        {"origin": "http://localhost:8400", "sec-fetch-site": "same-origin"}
    )
    assert (await browser.submit(f"{MESH}/do/suspend", id=scene.root)).status_code == 303
    assert await count_actions(store) == 1


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost:8400", True),
        ("127.0.0.1:8400", True),
        ("[::1]:8400", True),
        ("10.1.2.3", True),
        ("ops.example.com", True),
        ("OPS.example.com.:8400", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("ops.example.com@evil.example", False),
        ("", False),
        ("[::1", False),
    ],
)
async def test_a_site_that_resolves_to_this_host_is_refused(
    make_browser: Any, host: str, is_known: bool
) -> None:
    browser = make_browser(hosts=["ops.example.com"])
    page = await browser.http.get(f"{MESH}/waiting", headers={"host": host})
    assert page.status_code == (200 if is_known else 421)


async def test_without_authentication_only_this_host_has_access(make_browser: Any) -> None:
    browser = make_browser(LocalAccess("ada"), client="10.0.0.9")
    assert (await browser.get(f"{MESH}/waiting")).status_code == 403


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip", "via"])
async def test_without_authentication_a_proxy_on_this_host_opens_it_to_nobody(
    browser: Browser, header: str
) -> None:
    page = await browser.http.get(f"{MESH}/waiting", headers={header: "203.0.113.7"})
    assert page.status_code == 403


@pytest.mark.parametrize(
    ("client", "names", "role"),
    [
        ("10.0.0.5", ["ada"], "operate"),
        ("10.0.0.5", ["bob"], "view"),
        ("10.0.0.6", ["ada"], None),
        ("10.0.0.5", [], None),
        ("10.0.0.5", ["ada", "bob"], None),
        ("10.0.0.5", ["a b"], None),
        ("unix", ["ada"], None),
    ],
)
async def test_only_the_proxy_names_users(
    make_browser: Any, client: str, names: list[str], role: str | None
) -> None:
    browser = make_browser(ProxyAccess("X-User", ["10.0.0.5"], ["ada"]), client=client)
    headers = [("x-user", name) for name in names]
    page = await browser.http.get(f"{MESH}/waiting", headers=headers)
    assert page.status_code == (403 if role is None else 200)
    assert role is None or f'title="Role: {role}">{names[0]}' in page.text


async def test_other_methods_and_large_forms_are_refused(browser: Browser) -> None:
    assert (await browser.http.put(f"{MESH}/waiting")).status_code == 405
    assert (await browser.http.post("/static/dashboard.css")).status_code == 405
    large = await browser.http.post(f"{MESH}/do/cancel", content=b"x" * 1_100_000)
    assert large.status_code == 413
    many = await browser.http.post(f"{MESH}/do/cancel", content=b"a=1&" * 2_000)
    assert many.status_code == 413


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "there is no token"),
        ("ada operate short", "fewer than 20 characters"),
        (f"ada admin {ADA}", "line 1 is not a user"),
        (f"ada {ADA}", "line 1 is not a user"),
        (f"a/b view {ADA}", "line 1 is not a user"),
        (f"ada view {ADA}\nbob view {ADA}", "line 2 has the token of another user"),
        (f"ada view {ADA}\nada operate {BOB}", "two users have the same name"),
    ],
)
def test_odd_tokens_are_refused_without_showing_them(content: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        TokenAccess.from_text(content)
    assert problem in str(refused.value).replace(":", "")
    assert ADA not in str(refused.value)


def test_a_file_of_tokens_is_private(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        TokenAccess.from_file(file)
    file.write_text(f"ada operate {ADA}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="others than its owner can read it"):
        TokenAccess.from_file(file)
    file.chmod(0o600)
    logged_in = TokenAccess.from_file(file).log_in(ADA)
    assert logged_in is not None
    assert logged_in[0] == User("ada", Role.OPERATE)
