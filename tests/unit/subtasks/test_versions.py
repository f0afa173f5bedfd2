"""A function's version changes with its code and with nothing else."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import operator
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshpoint.errors import ConfigurationError
from meshpoint.subtasks.versions import subtask, version_of

PLAIN_SOURCE = """
    def step(ratio: float, digits: int = 2) -> float:
        return round(ratio * 100, digits)
"""


def write_module(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def load_module(path: Path) -> ModuleType:
    """The module in the file, loaded without `sys.modules` and without cached bytecode."""
    spec = importlib.util.spec_from_file_location("steps", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    return module


@pytest.fixture
def version_in(tmp_path: Path) -> Callable[[str], str]:
    """Computes the version of `step` in a source, using a new file each time."""
    files = iter(range(1000))

    def version(source: str) -> str:
        step = load_module(write_module(tmp_path / f"steps_{next(files)}.py", source)).step
        return version_of(step)

    return version


def test_layout_comments_and_docstrings_do_not_change_the_version(
    version_in: Callable[[str], str],
) -> None:
    other = '''
        # The ratio module.
        import math


        def step(
            ratio: float,
            digits: int = 2,  # after the point
        ) -> float:
            """In percent."""
            return round((ratio * 100), digits)
    '''
    assert version_in(PLAIN_SOURCE) == version_in(other)
    assert version_in(PLAIN_SOURCE).startswith("src:")


@pytest.mark.parametrize(
    "changed",
    [
        PLAIN_SOURCE.replace("100", "1000"),
        PLAIN_SOURCE.replace("100", "100.0"),
        PLAIN_SOURCE.replace("* 100", "/ 100"),
        PLAIN_SOURCE.replace("digits: int = 2", "digits: int = 3"),
        PLAIN_SOURCE.replace("-> float", "-> int"),
        PLAIN_SOURCE.replace(
            "    def step", "    import functools\n\n    @functools.cache\n    def step"
        ),
        PLAIN_SOURCE.replace("    def step", "    async def step"),
        PLAIN_SOURCE.replace("return round", "return 1 + round"),
    ],
)
def test_a_change_in_behaviour_changes_the_version(
    version_in: Callable[[str], str], changed: str
) -> None:
    assert version_in(PLAIN_SOURCE) != version_in(changed)


def test_decorators_change_the_version(version_in: Callable[[str], str]) -> None:
    retrying = """
        import functools

        def retry(times):
            def around(function):
                @functools.wraps(function)
                def wrapper(*args):
                    return function(*args)
                return wrapper
            return around

        @retry(3)
        def step(ratio):
            return ratio
    """
    assert version_in(retrying) != version_in(retrying.replace("@retry(3)", "@retry(4)"))
    assert version_in(retrying) == version_in(
        retrying.replace("return function(*args)", "return function(*args, )")
    )


def test_an_explicit_version_replaces_that_of_the_code(version_in: Callable[[str], str]) -> None:
    marked = (
        "from meshpoint.subtasks.versions import subtask\n"
        "@subtask(version='7')\n"
        "def step(): return {}\n"
    )
    assert version_in(marked.format(1)) == version_in(marked.format(2)) == "v:7"


def test_an_explicit_version_is_seen_through_what_wraps_it() -> None:
    @subtask(version="2")
    def step() -> None: ...

    class Parser:
        @subtask(version="3")
        def parse(self) -> None: ...

        @subtask(version="4")
        def __call__(self) -> None: ...

    @functools.wraps(step)
    def wrapper() -> None:
        step()

    assert version_of(functools.partial(step)) == version_of(wrapper) == "v:2"
    assert version_of(Parser().parse) == version_of(functools.partial(Parser().parse)) == "v:3"
    assert version_of(Parser()) == "v:4"


def test_marking_a_version_returns_the_function_itself() -> None:
    def step() -> int:
        return 1

    assert subtask(version="1")(step) is step


@pytest.mark.parametrize("function", [len, "".join])
def test_an_object_that_cannot_be_marked_is_refused_by_name(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be marked"):
        subtask(version="1")(function)
    with pytest.raises(ConfigurationError, match="the version is empty"):
        subtask(version="")


class Calculator:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def ratio(self, of: int) -> int:
        return of * self.factor

    def __call__(self, of: int) -> int:
        return of + self.factor


def double(of: int) -> int:
    return of * 2


def test_partials_methods_and_callables_have_their_functions_version() -> None:
    assert version_of(functools.partial(double, of=1)) == version_of(double)
    assert (
        version_of(Calculator(1).ratio)
        == version_of(Calculator(2).ratio)
        == version_of(Calculator.ratio)
    )
    assert (
        version_of(Calculator(1)) == version_of(Calculator(2)) == version_of(Calculator.__call__)
    )
    assert (
        len({version_of(double), version_of(Calculator.ratio), version_of(Calculator.__call__)})
        == 3
    )


def test_builtins_and_classes_are_versioned_by_name() -> None:
    assert version_of(len) == "name:builtins.len"
    assert version_of(str.upper) == "name:builtins.str.upper"
    assert version_of(Calculator).endswith(".Calculator")
    assert version_of(operator.itemgetter(1)) == "name:operator.itemgetter"


def test_functions_of_one_definition_have_one_version() -> None:
    def make(factor: int) -> Callable[[int], int]:
        def step(of: int) -> int:
            return of * factor

        return step

    assert version_of(make(1)) == version_of(make(2))
    assert version_of(make(1)).startswith("src:")


def test_lambdas_differ_by_their_bytecode() -> None:
    first, second, third = (lambda x: x + 1), (lambda x: x + 1), (lambda x: x + 2)
    assert version_of(first) == version_of(second) != version_of(third)
    assert version_of(first).startswith("code:")
    assert version_of(lambda x: x in {"a", "b"}) != version_of(lambda x: x in {"a", "c"})
    assert version_of(lambda x: len(x) + 1) != version_of(lambda x: sum(x) + 1)
    assert version_of(lambda: [lambda: 1]) != version_of(lambda: [lambda: 2])
    assert version_of(lambda: 1) != version_of(lambda: True) != version_of(lambda: 1.0)


def test_code_without_a_file_has_the_version_of_its_bytecode() -> None:
    def define_without_file(source: str) -> Callable[..., Any]:
        scope: dict[str, Any] = {}
        exec(source, scope)
        step: Callable[..., Any] = scope["step"]
        return step

    assert version_of(define_without_file("def step(): return 1")).startswith("code:")
    assert version_of(define_without_file("def step(): return 1")) == version_of(
        define_without_file("\n\ndef step(): return 1")
    )
    assert version_of(define_without_file("def step(): return 1")) != version_of(
        define_without_file("def step(): return 2")
    )


@pytest.fixture
def default_recursion_limit() -> Iterator[None]:
    """The limit that Python starts with; other tests may have raised it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("default_recursion_limit")
def test_code_that_is_nested_too_deep_has_the_version_of_its_bytecode(
    version_in: Callable[[str], str],
) -> None:
    source = f"def step(a): return {' + '.join(['a'] * 900)}"
    assert version_in(source).startswith("code:")
    assert version_in(source) != version_in(source + " + a")


def test_an_edit_since_the_import_does_not_change_the_running_version(tmp_path: Path) -> None:
    path = write_module(tmp_path / "steps.py", PLAIN_SOURCE)
    running = load_module(path).step
    write_module(path, PLAIN_SOURCE.replace("100", "1000"))
    restarted = load_module(path).step
    assert version_of(running) != version_of(restarted)
    assert version_of(running).startswith("code:")
    assert version_of(restarted).startswith("src:")


def test_an_edit_elsewhere_in_the_file_changes_nothing(tmp_path: Path) -> None:
    path = write_module(tmp_path / "steps.py", PLAIN_SOURCE)
    running = load_module(path).step
    write_module(path, "    import math\n\n\n    def other():\n        return 1\n" + PLAIN_SOURCE)
    restarted = load_module(path).step
    assert version_of(running) == version_of(restarted)
    assert version_of(running).startswith("src:")


def test_a_computed_version_stays_when_the_file_changes_or_disappears(tmp_path: Path) -> None:
    path = write_module(tmp_path / "steps.py", PLAIN_SOURCE)
    step = load_module(path).step
    found = version_of(step)
    write_module(path, "def step(: nonsense")
    linecache.clearcache()
    assert version_of(step) == found
    path.unlink()
    assert version_of(step) == found


def test_a_source_cached_by_a_traceback_does_not_hide_an_edit(tmp_path: Path) -> None:
    path = write_module(tmp_path / "steps.py", PLAIN_SOURCE)
    linecache.getlines(str(path))
    write_module(path, PLAIN_SOURCE.replace("100", "1000"))
    assert version_of(load_module(path).step).startswith("src:")


def test_the_running_one_of_two_definitions_is_versioned(version_in: Callable[[str], str]) -> None:
    two_definitions = """
        def step(ratio):
            return ratio

        first = step

        def step(ratio: float):
            return ratio
    """
    only = """
        def step(ratio: float):
            return ratio
    """
    assert version_in(two_definitions) == version_in(only)


VARIED_SOURCE = '''
    from __future__ import annotations

    async def step(
        rows: list[dict[str, int]], *args: int, cut: float = .5, **more: object
    ) -> dict[str, object]:
        """Varied."""
        names = {
            row["name"]: f"{row['value']!r:>{cut}} and {row}"
            for row in rows
            if row["value"] in {1, 2, 3}
        }
        match names:
            case {"a": str() as found, **rest} if found:
                yield {**rest, "found": found[1:2, ...]}
        try:
            async with more["lock"] as lock:  # type: ignore
                yield [x async for x in lock], b"bytes", -1j, None
        except* (ValueError, OSError) as group:
            raise group from None
        lambda *, key=1: key

    by_bytecode = lambda word: word in {"one", "two", "three", ("four", b"five"), 6}
'''


def version_in_new_process(path: Path, hash_seed: str) -> str:
    script = f"""
import importlib, sys
from meshpoint.subtasks.versions import version_of
sys.path.insert(0, {str(path.parent)!r})
module = importlib.import_module({path.stem!r})
print(version_of(module.step), version_of(module.by_bytecode))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.stdout.strip()


def test_another_process_computes_the_same_version(tmp_path: Path) -> None:
    path = write_module(tmp_path / "steps_elsewhere.py", VARIED_SOURCE)
    module = load_module(path)
    for hash_seed in ("1", "2"):
        assert (
            version_in_new_process(path, hash_seed)
            == f"{version_of(module.step)} {version_of(module.by_bytecode)}"
        )


def test_the_version_does_not_depend_on_the_python(tmp_path: Path) -> None:
    # The same under CPython 3.11, 3.12 and 3.13.
    path = write_module(tmp_path / "steps_varied.py", VARIED_SOURCE)
    assert version_of(load_module(path).step) == "src:6f15bee0d5d7c0a9e655eb40e1857aa5"
