"""YAML files with `${VAR}` in them, as plain mappings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from meshpoint.errors import ConfigurationError
from meshpoint.input_files import read_bounded

_LARGEST = 1024 * 1024  # bytes; PyYAML needs about 10 s and 400 MB for as much
_MOST_VALUES = 100_000  # keys count too, and each 100 characters of a text
_MOST_DIGITS = 1000
_TOO_MANY = f"its aliases expand to more than {_MOST_VALUES} values"

_REFERENCE = re.compile(
    r"(?P<escaped>\$\$\{)|\$\{\s*(?P<name>[A-Za-z_]\w*)\s*(?:,(?P<default>[^}]*))?\}|(?P<broken>\$\{)"
)


def read(path: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """The sections of one file, its variables replaced.

    Top-level keys that start with `x-` are left out: they are a place for YAML anchors.

    Raises:
        ConfigurationError: the file cannot be read, is not a YAML mapping, has a key twice, or names a variable
            that is not set.
    """
    try:
        text = read_bounded(path, _LARGEST).decode()
        content = yaml.load(text, Loader=_UniqueKeys)
        refuse_expansion(content)
    except OSError as error:
        problem = error.strerror or type(error).__name__
        problem = problem[:1].lower() + problem[1:]
        raise ConfigurationError(str(path), problem, "name a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(str(path), "is not UTF-8", "save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(str(path), _yaml_problem(error), "correct the YAML there") from error
    except RecursionError as error:
        raise ConfigurationError(str(path), "is nested too deep", "flatten it") from error
    except (ValueError, OverflowError, AttributeError, TypeError) as error:  # from an invalid date or number
        raise ConfigurationError(
            str(path), f"has a value that cannot be read: {error}", "put it in quotes"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(str(path), "holds no mapping", "start it with the line 'mesh:' or 'agent:'")
    kept = {str(key): value for key, value in content.items() if not str(key).startswith("x-")}
    return {key: interpolate(value, env, f"{path}: {key}") for key, value in kept.items()}


def interpolate(value: Any, env: Mapping[str, str], key: str) -> Any:
    """`value` with each `${VAR}` and `${VAR, default}` in its strings replaced; `$${` stands for `${`.

    A variable that is set, even to nothing, wins over the default.

    Raises:
        ConfigurationError: a variable without default is not set; names it and the key it stands in.
    """
    match value:
        case str():
            return _REFERENCE.sub(lambda reference: _replacement(reference, env, key), value)
        case dict():
            return {name: interpolate(item, env, f"{key}.{name}") for name, item in value.items()}
        case list():
            return [interpolate(item, env, f"{key}[{index}]") for index, item in enumerate(value)]
        case _:
            return value


def _replacement(reference: re.Match[str], env: Mapping[str, str], key: str) -> str:
    if reference["escaped"]:
        return "${"
    if reference["broken"]:
        raise ConfigurationError(key, "has a '${' that names no variable", "write ${NAME} or ${NAME, default}")
    name, default = reference["name"], reference["default"]
    value = env.get(name, None if default is None else default.strip())
    if value is None:
        raise ConfigurationError(
            key, f"the variable {name} is not set", f"export {name}, or write ${{{name}, default}}"
        )
    return value


def refuse_expansion(content: object) -> None:
    """Refuse YAML whose aliases multiply: a few lines can expand to gigabytes.

    Raises:
        yaml.YAMLError: `content` has too many values after expansion, or contains itself.
    """
    if _expanded(content, {}) > _MOST_VALUES:
        raise yaml.YAMLError(_TOO_MANY)


def _expanded(value: object, sizes: dict[int, int]) -> int:
    """The size of `value` after expanding aliases. `sizes` caches results by identity."""
    if not isinstance(value, dict | list | tuple | set):  # a pair of `!!pairs` is a tuple
        return 1 + len(value) // 100 if isinstance(value, str | bytes) else 1
    known = sizes.get(id(value))
    if known == 0:
        raise yaml.YAMLError("an alias contains itself")
    if known is None:
        sizes[id(value)] = 0
        inner = chain(value, value.values()) if isinstance(value, dict) else value
        known = sizes[id(value)] = 1 + sum(_expanded(each, sizes) for each in inner)
    return known


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping; plain YAML would keep the last one in silence."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._flat: set[yaml.MappingNode] = set()
        self._copied = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called before a mapping is built, and before it is copied to where '<<' names it."""
        if node not in self._flat:
            self._flat.add(node)
            _refuse_repeated_keys(node)
            super().flatten_mapping(node)
        self._copied += len(node.value)
        if self._copied > _MOST_VALUES:
            raise yaml.YAMLError(_TOO_MANY)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuse numbers too long to show in an error. Base 60 would also take quadratic time."""
        if len(node.value) > _MOST_DIGITS:
            raise ValueError(f"a number with more than {_MOST_DIGITS} digits")
        return super().construct_yaml_int(node)


_UniqueKeys.add_constructor("tag:yaml.org,2002:int", _UniqueKeys.construct_yaml_int)


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands here a second time", key.start_mark
                )
            seen.add(key.value)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error.args[0]) if type(error) is yaml.YAMLError else "is not YAML"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
