"""The version of a subtask's function covers what it uses of its module, and nothing else."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshpoint.subtasks import module_source
from meshpoint.subtasks.dependencies import version_with_uses
from meshpoint.subtasks.validity import describe_change
from meshpoint.subtasks.versions import version_of

MODULE = '''
import functools
import json
from decimal import Decimal
from os.path import basename

RATE = 3
TABLE = {"a": 1, "b": 2}
DERIVED = RATE * 2
HANDLERS = {}
HANDLERS["x"] = lambda value: value
UNUSED = 1
CACHE = {}
calls = 0
LIMITS: tuple[int, ...] = (1, 2)
first, second = 5, 6
for key in ("k", "l"):
    TABLE[key] = 7
try:
    MODE = "fast"
except ImportError:
    MODE = "slow"


def retry(times):
    def around(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)
        return wrapper
    return around


class Base:
    factor = 2

    def scale(self, value):
        """Scale it."""
        return value * self.factor


class Parser(Base):
    weights = {"a": 1}

    def parse(self, text):
        return self.scale(self._strip(text)), self.weights, self.size

    def _strip(self, text):
        return text.strip()

    @property
    def size(self):
        return helper(1)

    @staticmethod
    def other():
        return 0


parser = Parser()


def helper(value):
    return value + 1


def even(number):
    return number == 0 or odd(number - 1)


def odd(number):
    return number != 0 and even(number - 1)


@functools.cache
def cached(value):
    return value


@retry(3)
def decorated(value):
    return value


twice = lambda value: value * 2
partial = functools.partial(helper, 4)


def outer():
    def inner(value):
        return value * RATE

    def step(value):
        return inner(value)

    return step


def step(value):
    return BODY
'''


class Modules:
    """Modules written to files, each with another `step`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "steps.py"
        self._count = 0

    def load(self, source: str) -> ModuleType:
        self._count += 1
        self.path = self._folder / f"steps_{self._count}.py"
        self.path.write_text(source, encoding="utf-8")
        module = ModuleType("steps")
        code = compile(source, str(self.path), "exec", dont_inherit=True)
        exec(code, module.__dict__)
        return module

    def version(self, body: str, old: str = "", new: str = "", step: str = "step") -> str:
        """The version of `step`, which returns `body`, after an edit of the module."""
        assert old in MODULE
        source = MODULE.replace(old, new, 1) if old else MODULE
        found: Any = self.load(source.replace("BODY", body))
        for name in step.split("."):
            found = getattr(found, name)
        return version_with_uses(found)


@pytest.fixture
def modules(tmp_path: Path) -> Modules:
    return Modules(tmp_path)


COUNTED = {
    "a helper": ("helper(value)", "value + 1", "value + 2", "'helper', which it uses, has"),
    "a helper's helper": ("parser.size", "value + 1", "value + 2", "'helper'"),
    "a number": ("RATE", "RATE = 3", "RATE = 4", "'RATE', which it uses, has changed"),
    "a number behind another": ("DERIVED", "RATE = 3", "RATE = 4", "'RATE'"),
    "a table": ("TABLE['a']", '"b": 2', '"b": 3', "'TABLE'"),
    "a later assignment": ("TABLE", "TABLE[key] = 7", "TABLE[key] = 8", "'TABLE'"),
    "a registered function": ("HANDLERS", "lambda value: value\n", "lambda value: None\n", ""),
    "a typed constant": ("LIMITS", "(1, 2)", "(1, 3)", "'LIMITS'"),
    "one of several targets": ("second", "5, 6", "5, 7", "'second'"),
    "inside try": ("MODE", '"fast"', '"faster"', "'MODE'"),
    "a circle": ("even(value)", "number != 0", "number > 0", "'odd'"),
    "a cached helper": ("cached(value)", "return value\n\n\n@re", "return 1\n\n\n@re", ""),
    "a decorator's argument": ("decorated(value)", "@retry(3)", "@retry(4)", "'decorated'"),
    "a decorator's wrapper": ("decorated(value)", "return function(*args)", "return None", ""),
    "a lambda": ("twice(value)", "value * 2\n", "value * 3\n", ""),
    "a partial": ("partial()", "(helper, 4)", "(helper, 5)", "'partial'"),
    "a class": ("Parser().other()", "return 0", "return 1", "'Parser'"),
    "a base class": ("Parser()", "factor = 2", "factor = 3", "'Base'"),
    "an object's class": ("parser.parse(value)", "text.strip()", "text", "'Parser'"),
    "in a nested function": ("(lambda: RATE)()", "RATE = 3", "RATE = 4", "'RATE'"),
    "in a comprehension": ("[RATE for _ in value]", "RATE = 3", "RATE = 4", "'RATE'"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "old", "new", "change"), COUNTED.values(), ids=COUNTED)
def test_an_edit_of_what_a_function_uses_counts(
    modules: Modules, body: str, old: str, new: str, change: str
) -> None:
    before, after = modules.version(body), modules.version(body, old, new)
    described = describe_change(before, after)
    assert described is not None
    assert change in described
    assert describe_change(after, before) is not None
    assert describe_change(before, modules.version(body)) is None


NOT_COUNTED = {
    "what it does not use": ("helper(value)", "UNUSED = 1", "UNUSED = 2"),
    "layout and comments": ("helper(value)", "return value + 1", "return (value  +  1)  # one"),
    "a docstring": ("Parser()", '"""Scale it."""', '"""Scale the value."""'),
    "another method": ("value", "return 0", "return 1"),
    "an import": ("json.dumps(value)", "import json", "import json  # for dumps"),
    "from another module": ("basename(value)", "import basename", "import dirname as basename"),
    "its own name": ("value", "RATE = 3", "RATE = 4"),
}


@pytest.mark.parametrize(("body", "old", "new"), NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_other_edits_do_not_count(modules: Modules, body: str, old: str, new: str) -> None:
    assert modules.version(body) == modules.version(body, old, new)


METHODS = {
    "another method": ("text.strip()", "text", "Parser._strip"),
    "an inherited method": ("value * self.factor", "value", "Base.scale"),
    "a class constant": ('weights = {"a": 1}', 'weights = {"a": 2}', "Parser.weights"),
    "an inherited constant": ("factor = 2", "factor = 3", "Base.factor"),
    "a property": ("return helper(1)", "return 1", "Parser.size"),
    "behind a property": ("value + 1", "value + 2", "helper"),
}


@pytest.mark.parametrize("step", ["parser.parse", "Parser.parse"])
@pytest.mark.parametrize(("old", "new", "name"), METHODS.values(), ids=METHODS)
def test_members_that_a_method_mentions_count(
    modules: Modules, old: str, new: str, name: str, step: str
) -> None:
    before, after = modules.version("0", step=step), modules.version("0", old, new, step)
    assert repr(name) in str(describe_change(before, after))


def test_members_that_a_method_does_not_mention_do_not_count(modules: Modules) -> None:
    before = modules.version("0", step="parser.parse")
    assert before == modules.version("0", "return 0", "return 1", "parser.parse")


def test_functions_in_a_closure_count(modules: Modules) -> None:
    def version(old: str, new: str) -> str:
        return version_with_uses(modules.load(MODULE.replace(old, new, 1)).outer())

    before = version("", "")
    assert "'outer.<locals>.inner'" in str(
        describe_change(before, version("value * RATE", "value + RATE"))
    )
    assert "'RATE'" in str(describe_change(before, version("RATE = 3", "RATE = 4")))


def test_what_happens_at_run_time_does_not_count(modules: Modules) -> None:
    source = MODULE.replace(
        "return BODY", "global calls\n    calls += 1\n    return CACHE, calls, TABLE"
    )
    module = modules.load(source)
    before = version_with_uses(module.step)
    module.step(1)
    module.CACHE["x"] = object()
    module.TABLE.clear()
    assert version_with_uses(module.step) == before


def test_a_constant_counts_as_loaded_if_its_file_was_edited(modules: Modules) -> None:
    source = MODULE.replace("BODY", "RATE")
    edited_late = modules.load(source)
    before = version_with_uses(edited_late.step)
    modules.path.write_text(source.replace("RATE = 3", "RATE = 4"), encoding="utf-8")
    linecache.checkcache()
    edited = version_with_uses(edited_late.step)
    assert describe_change(edited, modules.version("RATE", "RATE = 3", "RATE = 4")) is not None
    assert describe_change(before, modules.version("RATE")) is None


def test_without_text_functions_and_plain_data_count() -> None:
    def version(source: str) -> str:
        module = ModuleType("steps")
        exec(compile(source, "<typed>", "exec"), module.__dict__)
        return version_with_uses(module.step)

    source = "RATE = [3]\nlock = object()\ndef helper(): return 1\n"
    source += "def step(): return helper(), RATE, lock\n"
    before = version(source)
    assert before.startswith("code:")
    assert version(source) == before
    assert "'RATE'" in str(describe_change(before, version(source.replace("[3]", "[4]"))))
    assert "'helper'" in str(describe_change(before, version(source.replace("n 1", "n 2"))))


def test_an_explicit_version_covers_what_a_function_uses(modules: Modules) -> None:
    mark = "from meshpoint.subtasks.versions import subtask\n"
    marked = mark + MODULE.replace("\n\ndef step", "\n\n@subtask(version='7')\ndef step")
    marked = marked.replace("BODY", "RATE")
    assert version_with_uses(modules.load(marked).step) == "v:7"
    helped = mark + MODULE.replace("def helper", "@subtask(version='1')\ndef helper")
    helped = helped.replace("BODY", "helper(value)")
    before = version_with_uses(modules.load(helped).step)
    assert before == version_with_uses(
        modules.load(helped.replace("value + 1", "value + RATE")).step
    )
    after = version_with_uses(modules.load(helped.replace("'1'", "'2'")).step)
    assert "'helper'" in str(describe_change(before, after))


def test_functions_that_use_nothing_say_so(modules: Modules) -> None:
    module = modules.load(MODULE.replace("BODY", "len(str(value))"))
    assert version_with_uses(module.step) == f"{version_of(module.step)} uses "
    assert version_with_uses(len) == version_of(len)


def test_a_record_of_the_previous_release_counts_as_equal(modules: Modules) -> None:
    module = modules.load(MODULE.replace("BODY", "helper(value)"))
    assert describe_change(version_of(module.step), version_with_uses(module.step)) is None


def test_a_first_use_is_a_change(modules: Modules) -> None:
    plain = version_with_uses(modules.load("def step(): return 1\n").step)
    other = plain + "helper=12345678"
    assert describe_change(plain, other) == "'helper', which it uses, has changed"
    assert describe_change(other, plain) == "'helper', which it uses, has changed"


@pytest.mark.parametrize("count", [250, 1500])
def test_long_chains_are_followed_to_their_end(modules: Modules, count: int) -> None:
    def change(source: str) -> str | None:
        before = version_with_uses(modules.load(source.replace("END", "1")).step)
        return describe_change(
            before, version_with_uses(modules.load(source.replace("END", "2")).step)
        )

    helpers = [f"def f{n}(): return f{n + 1}()\n" for n in range(250)]
    source = "".join(helpers) + "def f250(): return END\ndef step(): return f0()\n"
    constants = [f"C{n} = [C{n - 1}]\n" for n in range(1, count)]
    flat = "C0 = END\n" + "".join(constants).replace("[", "(").replace("]", ",)")
    last = f"def step(): return C{count - 1}\n"
    expected = "a helper or a constant that it uses has changed"
    assert change(source) == change(flat + last) == expected


@pytest.mark.parametrize(
    "nested",
    [
        "[" * 150 + "]" * 150,
        "x" + ".a" * 900 + " if False else 0",
        "+".join(["1"] * 1200),
        "0x" + "f" * 5000,
        "{0x" + "f" * 5000 + ": object}",
    ],
)
def test_deep_or_big_constants_are_no_problem(modules: Modules, nested: str) -> None:
    source = f"import os\nx = 1\nRATE = {nested}\nRATE_2 = 7\n"
    source += f"def step(): return RATE, RATE_2\ndef big(): return 0x{'f' * 5000}\n"
    before = version_with_uses(modules.load(source).step)
    assert before == version_with_uses(modules.load(source).step)
    assert version_with_uses(modules.load(source).big)
    after = version_with_uses(modules.load(source.replace("= 7", "= 8")).step)
    assert "'RATE_2'" in str(describe_change(before, after))


def test_deep_statements_are_no_problem(modules: Modules) -> None:
    branches = "".join(f"elif x == {n}:\n  y = {n}\n" for n in range(800))
    source = f"x = 1\nif x == 9000:\n  y = 1\n{branches}RATE = 7\n"
    source += "class Base:\n  limit = 3\n  def rate(self): return self.limit\n"
    source += "def step(): return RATE, Base\n"
    before = version_with_uses(modules.load(source).step)
    after = version_with_uses(modules.load(source.replace("= 7", "= 8")).step)
    assert "'RATE'" in str(describe_change(before, after))


def test_each_of_many_modules_is_parsed_once(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = [modules.load(f"RATE = {n}\ndef step(): return RATE\n") for n in range(8)]
    versions = [version_with_uses(each.step) for each in loaded]
    monkeypatch.setattr(module_source, "parse_module", None)
    assert [version_with_uses(each.step) for each in loaded] == versions


def test_an_edit_of_the_function_itself_is_named_first(modules: Modules) -> None:
    before = modules.version("helper(value)")
    after = modules.version("helper(value) + RATE", "value + 1", "value + 2")
    assert describe_change(before, after) == "its function has changed"


def test_several_changes_are_named(modules: Modules) -> None:
    body = "RATE, MODE, helper(value)"
    module = modules.load(
        MODULE.replace("BODY", body).replace("= 3", "= 4").replace('"fast"', '"slow"')
    )
    change = describe_change(modules.version(body), version_with_uses(module.step))
    assert change == "'MODE' and 'RATE', which it uses, have changed"


def test_many_names_are_digested_together(modules: Modules) -> None:
    def version(last: int) -> str:
        names = [f"N{number}" for number in range(20)]
        lines = [f"{name} = 1" for name in names[:-1]] + [f"{names[-1]} = {last}"]
        source = "\n".join([*lines, f"def step(): return {', '.join(names)}\n"])
        return version_with_uses(modules.load(source).step)

    assert len(version(1)) < 120
    assert version(1) == version(1)
    assert describe_change(version(1), version(2)) == (
        "a helper or a constant that it uses has changed"
    )


HOSTILE = """
class Endless:
    def __getattr__(self, name):
        return Endless()
    def __call__(self):
        return 1
    __hash__ = None

proxy = Endless()
total = {sum}

class Meta(type):
    def __eq__(self, other):
        raise ValueError
    __hash__ = None

class Odd(metaclass=Meta):
    pass

def step():
    return proxy, total, Odd, missing, proxy()
"""


def test_odd_values_are_no_problem(modules: Modules) -> None:
    source = HOSTILE.replace("{sum}", " + ".join(["1"] * 1200))
    before = version_with_uses(modules.load(source).step)
    assert before == version_with_uses(modules.load(source).step)
    after = version_with_uses(modules.load(source.replace("1 + 1", "1 + 2", 1)).step)
    assert "'total'" in str(describe_change(before, after))


def test_versions_are_the_same_in_every_process(modules: Modules, tmp_path: Path) -> None:
    body = "helper(value), TABLE, parser, decorated(value), {'a', 'b', 'c'}, HANDLERS"
    expected = modules.version(body)
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        import {modules.path.stem} as steps
        from meshpoint.subtasks.dependencies import version_with_uses
        print(version_with_uses(steps.step))
        """
    )
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert describe_change(expected, found.stdout.strip()) is None
