"""The guides to the frameworks are true."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scenario import FRAMEWORKS

from meshpoint.local import local_mesh

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"


def read_script(name: str) -> tuple[str, str]:
    """The script of a guide, and what it prints."""
    guide = (GUIDES / f"{name.replace('_', '-')}.md").read_text(encoding="utf-8")
    pattern = r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$"
    ((code, printed),) = re.findall(pattern, guide, flags=re.DOTALL | re.MULTILINE)
    return code, printed


@pytest.mark.parametrize("guide", [*FRAMEWORKS, "conversations"])
def test_the_script_prints_what_the_guide_shows(guide: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS.get(guide, "pydantic_ai"))
    code, printed = read_script(guide)
    (tmp_path / "pasted.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_the_agent_of_the_guide_answers_any_number_of_tasks(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model keeps nothing between requests, so any replica may send them."""
    pytest.importorskip(FRAMEWORKS[framework])
    code, _ = read_script(framework)
    name = f"guide_to_{framework}"
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    async with local_mesh(module.travel, module.flights, module.hotels) as mesh:
        first = await mesh.call(module.travel, module.Trip(city="Rome"))
        assert await mesh.call(module.travel, module.Trip(city="Rome")) == first
