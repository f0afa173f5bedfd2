"""What is checked in a real browser. Each check returns its problems."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from dashboard.browser import file_name
from dashboard.day import ACTIONS, Day
from dashboard.scene import NAMESPACE, Scene, call, open_store, respond, wait

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MESH = f"/m/{NAMESPACE}"
SIZES = {"wide": 1280, "narrow": 390}
_SERIOUS = {"serious", "critical"}
_MAX_SECONDS = 1.0
"""In which the progress of a task must reach the browser."""


def addresses(day: Day) -> dict[str, str]:
    """The address of each page, by its name in the pictures."""
    scene = day.scene
    return {
        "waiting": f"{MESH}/waiting",
        "questions": f"{MESH}/questions",
        "task": f"{MESH}/task?{urlencode({'id': scene.root})}",
        "operation": f"{MESH}/task?{urlencode({'id': scene.operation})}",
        "rescued": f"{MESH}/task?{urlencode({'id': day.rescued})}",
        "failures": f"{MESH}/failures",
        "agents": f"{MESH}/agents",
        "audit": f"{MESH}/audit",
        "answer": f"{MESH}/question?{urlencode({'id': scene.question.to_id()})}",
        "cancel": f"{MESH}/do/cancel?{urlencode({'id': scene.root})}",
        "failed": f"{MESH}/tasks?state=failed",
        "letter": f"{MESH}/letter?id=travel:1",
    }


@contextmanager
def opened(browser: Browser, problems: list[str], **options: Any) -> Iterator[Page]:
    """A page of a new profile. Errors in its scripts and violations of its policy are problems."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.on(
        "console",
        lambda message: (
            problems.append(f"{page.url}: {message.text}")
            if message.type == "error" and "status of 4" not in message.text
            else None
        ),
    )
    try:
        yield page
    finally:
        context.close()


def visit(page: Page, url: str) -> None:
    """Load a page, and wait until its scripts have run."""
    page.goto(url)
    if page.locator("#live-state").count():
        page.wait_for_selector("#live-state[data-state=live]")
    page.locator("time", has_text="UTC").first.wait_for(state="detached")
    if page.locator("#letters").count():
        page.wait_for_selector("#letters .card, #letters .empty")


def take_pictures(browser: Browser, address: str, day: Day, folder: Path) -> None:
    """Take a picture of each page, light and dark, wide and narrow."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        for size, width in SIZES.items():
            options = {"viewport": {"width": width, "height": 800}, "color_scheme": theme}
            with opened(browser, [], **options) as page:
                for name, path in addresses(day).items():
                    visit(page, address + path)
                    file = folder / f"{file_name(name)}-{theme}-{size}.png"
                    page.screenshot(path=str(file), full_page=True)
    print(f"pictures: {folder}")


def check_axe(browser: Browser, address: str, day: Day, axe: Path | None) -> list[str]:
    """Look for barriers on each page in each theme and size."""
    if axe is None or not axe.exists():
        return [f"axe-core is missing: {axe}"]
    source, problems, rules = axe.read_text(), list[str](), 0
    for theme in ("light", "dark"):
        for width in SIZES.values():
            options = {"viewport": {"width": width, "height": 800}, "color_scheme": theme}
            with opened(browser, problems, **options) as page:
                for name, path in addresses(day).items():
                    visit(page, address + path)
                    page.evaluate(source)
                    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
                    rules += len(found["passes"])
                    problems += [
                        f"{name}, {theme}, {width}: {each['id']}: {each['nodes'][0]['html'][:200]}"
                        for each in found["violations"]
                        if each["impact"] in _SERIOUS
                    ]
                    wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
                    problems += [f"{name}, {theme}, {width}: wider than the screen"] * wide
    print(f"axe-core: {rules} rules passed, {len(problems)} serious findings")
    return problems


def check_roles(browser: Browser, address: str, scene: Scene) -> list[str]:
    """Log in as a viewer and as an operator."""
    problems: list[str] = []
    with opened(browser, problems) as page:
        page.goto(f"{address}{MESH}/task?{urlencode({'id': scene.root})}")
        page.fill("input[name=token]", "b" * 28)
        page.click("main button[type=submit]")
        page.wait_for_selector("#content")
        if scene.root not in page.url or page.locator("a:has-text('Cancel')").count():
            problems.append("a viewer does not see the page, or sees its actions")
        page.click("text=Log out")
        page.fill("input[name=token]", "a" * 24)
        page.click("main button[type=submit]")
        visit(page, f"{address}{MESH}/task?{urlencode({'id': scene.root})}")
        if not page.locator("a:has-text('Cancel')").count():
            problems.append("an operator sees no action")
    print("roles: checked")
    return problems


def check_live(browser: Browser, address: str, folder: Path) -> list[str]:
    """Answer a call of a task that a page shows, and switch the theme and pages by keys."""
    problems: list[str] = []

    async def begin() -> Any:
        store = await open_store(f"sqlite:///{folder}/mesh.db")
        pause = await wait(store, "travel", call("flights"), call("hotels"))
        await store.close()
        return pause

    async def answer(pause: Any) -> None:
        store = await open_store(f"sqlite:///{folder}/mesh.db")
        await respond(store, pause, "hotels")
        await store.close()

    with ThreadPoolExecutor(1) as pool, opened(browser, problems) as page:
        pause = pool.submit(asyncio.run, begin()).result()
        visit(page, f"{address}{MESH}/task?{urlencode({'id': pause.run.task_id})}")
        page.wait_for_selector("text=0 of 2")
        pool.submit(asyncio.run, answer(pause)).result()
        begun = monotonic()
        page.wait_for_selector("text=1 of 2")
        seconds = monotonic() - begun
        print(f"live: a task's progress was on the page after {seconds:.2f} s")
        if seconds > _MAX_SECONDS:
            problems.append(f"progress took {seconds:.2f} s")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        page.keyboard.press("2")
        page.wait_for_url("**/questions")
        after = page.evaluate("getComputedStyle(document.body).backgroundColor")
        if before == after:
            problems.append("the theme is not kept")
        page.keyboard.press("/")
        page.keyboard.type(pause.run.task_id)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/task?id={pause.run.task_id}")
    return problems


def check_actions(browser: Browser, address: str, scene: Scene) -> list[str]:
    """Do each action as a person does, and read the result in the audit."""
    problems: list[str] = []

    def expect(page: Page, text: str) -> None:
        page.wait_for_selector(f".notice.good:has-text('{text}')")

    with opened(browser, problems) as page:
        task = f"{address}{MESH}/task?{urlencode({'id': scene.root})}"
        for link, button, result in (
            ("Suspend", "Suspend", "suspended"),
            ("Resume", "Resume", "continued"),
        ):
            visit(page, task)
            page.click(f"main a:has-text('{link}')")
            page.click(f"main button:has-text('{button}')")
            expect(page, result)
        visit(page, f"{address}{MESH}/question?{urlencode({'id': scene.question.to_id()})}")
        page.click("text=Send answer")
        if "questions" in page.url:
            problems.append("a form without a required answer was sent")
        page.check("input[value=true]")
        page.click("text=Send answer")
        expect(page, "answered approval")
        visit(page, task)
        page.click("main a:has-text('Cancel')")
        page.click("main button:has-text('Cancel')")
        expect(page, "cancelled 3 tasks")
        visit(page, f"{address}{MESH}/task?{urlencode({'id': scene.operation})}")
        page.click("main a:has-text('Resume')")
        page.check("input[value=start]")
        page.click("main button:has-text('Resume')")
        expect(page, "ready for attempt 2")
        for link, result in (
            ("Offer again 3", "offered 3 tasks again"),
            ("Replay", "replayed 3 letters"),
            ("Drop", "dropped 1 letter"),
            ("Resume 4", "left as they are: 4 without a checkpoint"),
        ):
            visit(page, f"{address}{MESH}/failures")
            page.click(f"main a:has-text('{link}') >> nth=0")
            page.click("main form button[type=submit]")
            expect(page, result)
        visit(page, f"{address}{MESH}/audit")
        count = page.locator("tbody tr").count()
        if count != ACTIONS + 9:
            problems.append(f"the audit has {count - ACTIONS} new actions, not 9")
    print("actions: checked")
    return problems
