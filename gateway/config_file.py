"""Reads `wavegate.yaml`: text to `Config`, or one report of everything that is wrong with it.

Must never start anything, resolve names or depend on the environment: what it accepts is the file alone.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from gateway.config import Config
from gateway.config_problems import Problem, explain

DEFAULT_PATH = Path("wavegate.yaml")
MAX_FILE_BYTES = 1 << 20


class ConfigError(Exception):
    """The file cannot be used; the message is the complete report, ready to print."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


def load(path: Path) -> Config:
    """Read and validate the file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            str(path),
            [Problem("", "there is no such file; start from wavegate.example.yaml, or name one with -c")],
        ) from None
    except OSError as error:
        raise ConfigError(str(path), [Problem("", f"cannot be read: {error.strerror}")]) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(str(path), [Problem("", f"is larger than {MAX_FILE_BYTES} bytes")])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem("", f"is not UTF-8 text (byte {error.start})")]) from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Config:
    """Validate YAML text; `source` names it in messages. Raises ConfigError."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(source, [_syntax_problem(error)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(source, [Problem("", f"is not YAML: {error}")]) from None
    except RecursionError:
        raise ConfigError(source, [Problem("", "is nested too deeply to be a configuration")]) from None
    if duplicates := _duplicate_keys(root) if root is not None else []:
        raise ConfigError(source, duplicates)
    try:
        return Config.model_validate({} if data is None else data)
    except ValidationError as error:
        problems = [problem.at_line(_line(root, problem.keys)) for problem in explain(error, data)]
        raise ConfigError(source, sorted(problems, key=lambda problem: problem.line or 0)) from None


def _syntax_problem(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    message = f"is not YAML: {error.problem or error.context}"
    if "\\t" in message:
        message += "; indent with spaces, not tabs"
    return Problem("", message, line=mark.line + 1 if mark else None)


def _duplicate_keys(root: yaml.Node) -> list[Problem]:
    """PyYAML keeps the last of two equal keys without a word."""
    problems: list[Problem] = []
    seen: set[int] = set()  # an alias can make a node its own descendant
    pending = [(root, "")]
    while pending:
        node, path = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += [(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            first_lines: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                child = f"{path}.{key.value}" if path else str(key.value)
                name = str(key.value)
                if name in first_lines:
                    message = f"is given twice, first in line {first_lines[name]}; keep one"
                    problems.append(Problem(child, message, line))
                first_lines.setdefault(name, line)
                pending.append((value, child))
    return problems


def _line(root: yaml.Node | None, keys: tuple[str | int, ...]) -> int | None:
    """Line of the deepest existing node on the way along `keys`; None at the top."""
    node, line = root, None
    for key in keys:
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if name.value == str(key):
                    found, line = value, name.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            found = node.value[key]
            line = found.start_mark.line + 1
        if found is None:
            break
        node = found
    return line
