"""Turns pydantic's validation errors into sentences: where, what is wrong, what would be right.

Must never validate anything itself: `config` alone says what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.config import Config
from gateway.config_groups import GROUP_NAME_PATTERN, AdoptedGroup, EmbeddedGroup, VllmGroup
from gateway.config_types import Section, wrong_choice

Keys = tuple[str | int, ...]

_NAMED_KEY = re.compile(r"(?P<path>[a-z_]+(?:\[\d+\]|\.[a-z_]+)*): ")

_GROUP_ENGINES: Mapping[str, type[Section]] = {
    get_args(section.model_fields["engine"].annotation)[0]: section
    for section in (EmbeddedGroup, VllmGroup, AdoptedGroup)
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file."""

    path: str
    """Key path, e.g. `groups[0].port`; empty for the file as a whole."""
    message: str
    line: int | None = None
    keys: Keys = ()
    """The path as single keys and list positions."""

    def at_line(self, line: int | None) -> Problem:
        """The same problem with its place in the file."""
        return replace(self, line=line)

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        path = f"{self.path}: " if self.path else ""
        return f"{place}{path}{self.message}"


def explain(error: ValidationError, data: object) -> list[Problem]:
    """All errors of `error`, which validating `data` raised, in the order of the schema."""
    details = error.errors(include_url=False)
    problems: list[Problem] = []
    for detail in details:
        # When an item of a list is wrong, pydantic adds that too few valid items are left.
        if detail["type"] == "too_short" and any(
            _is_inside(other["loc"], detail["loc"]) for other in details
        ):
            continue
        problems += _problems(detail, data)
    return problems


def _is_inside(loc: Keys, outer: Keys) -> bool:
    return len(loc) > len(outer) and loc[: len(outer)] == outer


def _problems(detail: ErrorDetails, data: object) -> Iterator[Problem]:
    keys = _without_union_tag(detail["loc"])
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "value_error":
        for line in str(context["error"]).splitlines():
            yield (
                _of_several_keys(keys, line)
                if isinstance(value, dict)
                else Problem(_path(keys), line, keys=keys)
            )
        return
    if kind == "extra_forbidden":
        message = _unknown_key(keys, data)
    elif kind == "missing":
        message = f"is missing{_meaning(keys, data)}"
    elif kind in {"union_tag_not_found", "union_tag_invalid"}:
        keys = (*keys, "engine")
        message = _wrong_engine(value)
    elif kind in _MESSAGES:
        message = _MESSAGES[kind](value, context)
    else:
        message = f"is {_shown(value)}: {detail['msg']}"
    if keys and keys[-1] == "[key]":
        keys = keys[:-1]
        message = f"is not a rank's index; write a number such as 0, not {_shown(value)}"
    yield Problem(_path(keys), message, keys=keys)


def _without_union_tag(loc: Keys) -> Keys:
    """pydantic puts the chosen engine between `groups[i]` and the field."""
    if len(loc) > 2 and loc[0] == "groups" and loc[2] in _GROUP_ENGINES:
        return (*loc[:2], *loc[3:])
    return loc


def _of_several_keys(keys: Keys, line: str) -> Problem:
    """What a whole section finds wrong; it may begin with the key below `keys` that is to be changed."""
    if named := _NAMED_KEY.match(line):
        inner = (int(key) if key.isdigit() else key for key in re.findall(r"\w+", named["path"]))
        keys, line = (*keys, *inner), line[named.end() :]
    return Problem(_path(keys), line, keys=keys)


def _path(keys: Keys) -> str:
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key}" if text else key
    return text


def _section(keys: Keys, data: Any) -> type[Section] | None:
    """The section that the key `keys[-1]` stands in."""
    section: type[Section] | None = Config
    for key in keys[:-1]:
        data = data[key]
        if isinstance(key, int):
            section = _GROUP_ENGINES.get(data.get("engine"))
        elif key != "groups":
            section = _subsections(section).get(key) if section else None
    return section


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section as files spell them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _subsections(section: type[Section]) -> dict[str, type[Section]]:
    return {
        name: inner
        for name, field in _fields(section).items()
        for inner in (field.annotation, *get_args(field.annotation))  # a section, or one that may be left out
        if isinstance(inner, type) and issubclass(inner, Section)
    }


def _homes(key: str, section: type[Section] = Config, path: str = "the top level") -> Iterator[str]:
    """Where `key` would be right, below and including `section`."""
    if key in _fields(section):
        yield path
    if section is Config:
        for engine, group in _GROUP_ENGINES.items():
            yield from _homes(key, group, f"groups with engine: {engine}")
    for name, inner in _subsections(section).items():
        yield from _homes(key, inner, name if section is Config else f"{path}.{name}")


def _meaning(keys: Keys, data: object) -> str:
    section = _section(keys, data)
    field = _fields(section).get(str(keys[-1])) if section else None
    return f": {field.description}" if field and field.description else ""


def _unknown_key(keys: Keys, data: Any) -> str:
    key, section = str(keys[-1]), _section(keys, data)
    known = list(_fields(section)) if section else []
    if homes := list(_homes(key)):
        return f"is not a key here; it belongs to {' or '.join(homes)}"
    if near := difflib.get_close_matches(key, known, n=1):
        return f"is not a key here; did you mean {near[0]}?"
    return f"is not a key here; known are {', '.join(known)}"


def _wrong_engine(group: object) -> str:
    allowed = " or ".join(_GROUP_ENGINES)
    engine = group.get("engine") if isinstance(group, dict) else None
    if engine is None:
        return f"is missing; write {allowed}"
    near = difflib.get_close_matches(str(engine), _GROUP_ENGINES, n=1)
    return f"is {_shown(engine)}; " + (f"did you mean {near[0]}?" if near else f"write {allowed}")


def _shown(value: object) -> str:
    """A value as it stood in the file, shortened."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _must(requirement: str) -> Callable[[object, Mapping[str, Any]], str]:
    """A message from a requirement with placeholders for pydantic's bounds."""

    def message(value: object, context: Mapping[str, Any]) -> str:
        bounds = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in context.items()}
        return f"is {_shown(value)}; it must be {requirement.format(**bounds)}"

    return message


def _text(value: object, context: Mapping[str, Any]) -> str:
    if isinstance(value, bool | int | float):
        written = (
            f"YAML reads {_shown(value)} here, not text" if isinstance(value, bool) else f"is {_shown(value)}"
        )
        return f"{written}; it must be text: put it in quotes"
    return f"is {_shown(value)}; it must be text"


def _choice(value: object, context: Mapping[str, Any]) -> str:
    allowed = re.findall(r"'([^']*)'", context["expected"])
    return wrong_choice(_shown(value), str(value), allowed)


def _pattern(value: object, context: Mapping[str, Any]) -> str:
    if context["pattern"] == GROUP_NAME_PATTERN:
        return f"is {_shown(value)}; it must be 1 to 32 of a-z, 0-9 and -, beginning with a letter or digit"
    return f"is {_shown(value)}; it must match {context['pattern']}"


_MESSAGES: Mapping[str, Callable[[object, Mapping[str, Any]], str]] = {
    "bool_parsing": _must("true or false"),
    "bool_type": _must("true or false"),
    "dict_type": _must("a section (indented `key: value` lines)"),
    "enum": _choice,
    "float_parsing": _must("a plain number, without a unit"),
    "float_type": _must("a plain number"),
    "greater_than": _must("more than {gt}"),
    "greater_than_equal": _must("at least {ge}"),
    "int_from_float": _must("a whole number"),
    "int_parsing": _must("a plain whole number, without a unit"),
    "int_type": _must("a whole number"),
    "less_than": _must("less than {lt}"),
    "less_than_equal": _must("at most {le}"),
    "model_attributes_type": _must("a section (indented `key: value` lines)"),
    "model_type": _must("a section (indented `key: value` lines)"),
    "path_type": _must("a path in quotes"),
    "string_pattern_mismatch": _pattern,
    "string_too_long": _must("at most {max_length} characters long"),
    "string_too_short": _must("at least {min_length} character long"),
    "string_type": _text,
    "too_long": lambda value, context: (
        f"has {context['actual_length']} items; at most {context['max_length']} fit"
    ),
    "too_short": lambda value, context: "is empty; it needs at least one item",
    "tuple_type": _must("a list (lines beginning with `- `, or [a, b])"),
}
