"""The guides to the frameworks are true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scenario import FRAMEWORKS

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_script_prints_what_the_guide_shows(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS[framework])
    guide = (GUIDES / f"{framework.replace('_', '-')}.md").read_text(encoding="utf-8")
    pattern = r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$"
    ((code, printed),) = re.findall(pattern, guide, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "pasted.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
