"""Builds the documentation site into `site/` and checks it: `make docs`.

Each problem is one line on standard error, and any problem is exit code 1:

- a public name without a docstring, or without an entry on a page of the API reference;
- a warning or an error of the generator;
- a page that `nav` in `mkdocs.yml` lacks, or an entry without a page;
- a link or an image in a built page that leads nowhere, its anchor included;
- a site without a search index;
- a script, a style sheet, a font or an image that a built page would fetch from another host.

The last three read the built files only, so they do not depend on the generator. `--serve` shows
the site at http://127.0.0.1:8000 instead, and builds it again when a page changes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import yaml

if TYPE_CHECKING:
    import griffe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SITE = ROOT / "site"
API = SITE / "reference" / "api"
PUBLIC = (
    "meshpoint",
    *(f"meshpoint.{name}" for name in ("testing", "local", "operations", "client", "errors")),
)
GENERATOR = (sys.executable, "-m", "zensical")


class Page(HTMLParser):
    """The anchors, links and resources of one built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given:
            self.resources.append(given["src"])
        elif (
            tag == "link"
            and "href" in given
            and given.get("rel") not in {"canonical", "next", "prev"}
        ):
            self.resources.append(given["href"])


def public_names() -> dict[str, griffe.Object]:
    """Each name that a public module exports: by `__all__` or, without one, by defining it."""
    import griffe  # `unlisted` is also a test, which runs without the generator

    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    loader.load("meshpoint")
    loader.resolve_aliases()
    names: dict[str, griffe.Object] = {}
    for path in PUBLIC:
        module: griffe.Module = loader.modules_collection[path]
        exported = (
            [str(name) for name in module.exports] if module.exports else list(_defined(module))
        )
        for name in exported:
            member = module[name]
            names[f"{path}.{name}"] = member.final_target if member.is_alias else member
    return names


def _defined(module: griffe.Module) -> Iterator[str]:
    for name, member in module.members.items():
        if not (name.startswith("_") or member.is_alias or member.is_module):
            yield name


def undocumented(names: dict[str, griffe.Object]) -> Iterator[str]:
    """Public names that lack a docstring."""
    for name, target in names.items():
        if not target.has_docstring:
            yield (
                f"{target.relative_filepath}:{target.lineno}: {name} is public and has no "
                "docstring"
            )


def build() -> Iterator[str]:
    """Build the site, and return what the generator complains about."""
    done = subprocess.run(
        [*GENERATOR, "build", "--clean"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = re.sub(r"\x1b\[[\d;]*m", "", done.stderr)
    for problem, where in re.findall(r"^Warning: (.+)\n\W*\[ (\S+) \]", said, flags=re.MULTILINE):
        yield f"docs/{where}: {problem}"
    if done.returncode:  # a traceback of an extension, whose last lines say what it met
        collected = re.findall(r"Could not collect '([\w.]+)'", said)
        yield (
            f"docs/reference/api: {collected[-1]} does not exist"
            if collected
            else said.strip().splitlines()[-1]
        )


def unlisted() -> Iterator[str]:
    """Pages that the navigation lacks, and entries of the navigation without a page."""
    listed = set(_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    yield from (f"docs/{page}: not in the nav of mkdocs.yml" for page in sorted(written - listed))
    yield from (
        f"mkdocs.yml: the nav has {page}, which does not exist"
        for page in sorted(listed - written)
    )


def _pages(entry: Any) -> Iterator[str]:
    match entry:
        case str():
            yield entry
        case dict():
            for each in entry.values():
                yield from _pages(each)
        case _:
            for each in entry:
                yield from _pages(each)


def broken(names: dict[str, griffe.Object]) -> Iterator[str]:
    """What is wrong with the built pages."""
    if not (SITE / "search.json").exists():
        yield "search.json: the site has no search"
    pages = {path: Page(path) for path in sorted(SITE.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(SITE)
        for resource in page.resources:
            if urlsplit(resource).netloc:
                yield f"{where}: {resource} comes from another host"
        if path.name == "404.html":
            continue  # served at any address, so its links begin at the root of the server
        for link in {*page.links, *page.resources}:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.exists():
                yield f"{where}: {link} leads nowhere"
            elif (
                url.fragment
                and target in pages
                and unquote(url.fragment) not in pages[target].anchors
            ):
                yield f"{where}: {link} has no such anchor"
    described = {
        anchor for path, page in pages.items() if API in path.parents for anchor in page.anchors
    }
    for name, member in names.items():
        if not {name, member.path} & described:
            yield f"docs/reference/api: {name} is public and on no page"


def main() -> int:
    if "--serve" in sys.argv[1:]:
        return subprocess.run([*GENERATOR, "serve"], cwd=ROOT, check=False).returncode
    names = public_names()
    problems = [*undocumented(names), *unlisted(), *build()]
    if not problems:
        problems = list(broken(names))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        pages = sum(1 for _ in SITE.rglob("*.html"))
        print(f"site/index.html: {pages} pages, {len(names)} public names")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
