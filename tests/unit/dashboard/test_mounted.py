"""The dashboard as a part of another application."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount

from dashboard.client import Browser
from dashboard.scene import NAMESPACE, Scene
from meshpoint.dashboard import Dashboard, TokenAccess

TOKEN = "t" * 32


async def test_all_addresses_are_below_the_mount(config: Path, scene: Scene) -> None:
    dashboard = Dashboard(config, access=TokenAccess.from_text(f"ada operate {TOKEN}"))
    browser = Browser(Starlette(routes=[Mount("/mesh", dashboard)]))
    first = await browser.get("/mesh/")
    assert first.headers["location"] == "/mesh/login?next=%2F"
    path = f"/m/{NAMESPACE}/do/suspend?id={scene.root}"
    asked = await browser.get(f"/mesh{path}")
    done = await browser.submit(asked.headers["location"], {"token": TOKEN})
    assert done.headers["location"] == f"/mesh{path}"
    cookies = done.headers.get_list("set-cookie")
    assert all("Path=/mesh;" in each for each in cookies)
    for name in ("waiting", "failures", f"task?id={scene.root}", "audit"):
        page = (await browser.get(f"/mesh/m/{NAMESPACE}/{name}")).text
        addresses = re.findall(r'(?:href|src|action|sse-connect|hx-get)="([^"#]+)"', page)
        assert [each for each in addresses if not each.startswith("/mesh/")] == []
    style = await browser.get("/mesh/static/dashboard.css")
    assert (style.status_code, style.headers["cache-control"]) == (200, "no-cache")
    suspended = await browser.submit(f"/mesh{path}")
    assert suspended.headers["location"].startswith(f"/mesh/m/{NAMESPACE}/task?id={scene.root}")
    assert (await browser.get("/mesh/static/../app.py")).status_code == 404
    await dashboard.aclose()
