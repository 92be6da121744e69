"""Writes the messages of a chat as one text with a model's chat template, letter for letter as vLLM does.

Sources: vLLM 0.32 vllm/renderers/{chat_utils,hf}.py and vllm/entrypoints/openai/chat_completion/protocol.py;
the template's surroundings are those of transformers' chat_template_utils. What cannot be written with
certainty raises CannotRender. Templates run in Jinja's sandbox; must never read files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHANGING_HEADER = "x-anthropic-billing-header"
"""Line of some clients' system prompts that changes with each request; vLLM drops it."""
SERVER_SIDE = ("chat_template", "continue_final_message")
"""Fields of a request whose effect is not imitated here."""


class CannotRender(ValueError):
    """The text cannot be known for certain."""


class ChatTemplate:
    """One model's template."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """Compile a template.

        Args:
            source: in Jinja's language.
            special_tokens: `bos_token` and the like, which templates may print.

        Raises:
            jinja2.TemplateError: it is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._wants_parts = any(_loops_over_content(environment.parse(source)))
        self._knows_developers = '"developer"' in source or "'developer'" in source

    def render(self, request: Mapping[str, Any]) -> str:
        """The prompt of a chat request, given as parsed from its JSON.

        Raises:
            CannotRender: the request is none, has what is not text, or changes how its prompt is written.
        """
        if any(request.get(name) for name in SERVER_SIDE):
            raise CannotRender("the request changes how its prompt is written")
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages:
            raise CannotRender("no messages")
        try:
            conversation = [self._message(message) for message in messages]
            if not self._knows_developers and any(one["role"] == "developer" for one in conversation):
                conversation = _with_system_first(conversation)
            return self._template.render(messages=conversation, **self._variables(request))
        except CannotRender:
            raise
        except Exception as error:  # whatever a template does with what a client has sent
            raise CannotRender(f"{type(error).__name__}: {error}") from error

    def _variables(self, request: Mapping[str, Any]) -> dict[str, Any]:
        own = request.get("chat_template_kwargs") or {}
        asked = {
            "add_generation_prompt": request.get("add_generation_prompt", True),
            "documents": request.get("documents"),
            "reasoning_effort": request.get("reasoning_effort"),
        }
        if asked["reasoning_effort"] is not None and "enable_thinking" not in own:
            asked["enable_thinking"] = asked["reasoning_effort"] != "none"
        if own.keys() & {"chat_template", "tokenize", "tools", "continue_final_message"}:
            raise CannotRender("chat_template_kwargs changes how the prompt is written")
        tools = request.get("tools")
        return {
            **self._special_tokens,
            "documents": None,
            "tools": [_tool(tool) for tool in tools] if tools is not None else None,
            **own,
            **{name: value for name, value in asked.items() if value not in (None, "auto")},
        }

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message["role"]
        texts = list(_texts(message.get("content"), drops_header=role == "system"))
        content: Any = "\n".join(texts)
        if self._wants_parts and role != "tool":
            content = [{"type": "text", "text": text} for text in texts]
        written = {"role": role, "content": content}
        if role == "assistant":
            calls = message.get("tool_calls")
            if calls:
                written["tool_calls"] = [_call(call) for call in calls]
            reasoning = message.get("reasoning")
            if reasoning is None:
                reasoning = message.get("reasoning_content")
            if reasoning is not None:
                written["reasoning"] = written["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            written["tool_call_id"] = message["tool_call_id"]
        elif role == "developer":
            written["tools"] = message.get("tools")
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                written[name] = message[name]
        return written


def _texts(content: Any, *, drops_header: bool) -> Iterator[str]:
    parts = [] if content is None else [content] if isinstance(content, str) else content
    for part in parts:
        text = part if isinstance(part, str) else _text_of(part)
        if drops_header and text.startswith(CHANGING_HEADER):
            text = text.partition("\n")[2]
            if not text:
                continue
        yield text


def _text_of(part: Mapping[str, Any]) -> str:
    if part.keys() != {"type", "text"} or part["type"] != "text" or not isinstance(part["text"], str):
        raise CannotRender("content that is not only text")
    return part["text"]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: what is no object counts as an empty one."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool definition with the fields that vLLM knows, in its order; of these two are shown when absent."""
    given = tool["function"]
    deferred = tool.get("defer_loading")
    function = {name: given.get(name) for name in ("description", "parameters")}
    optional = {"strict": given.get("strict"), "defer_loading": given.get("defer_loading", deferred)}
    shown = {"name": given["name"], **function, **{k: v for k, v in optional.items() if v is not None}}
    written = {"type": "function", "function": shown}
    return written if deferred is None else {**written, "defer_loading": deferred}


def _with_system_first(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that know no developers: they count as the system, which speaks once, at first."""
    renamed = []
    for message in conversation:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            del message["tools"]
        renamed.append(message)
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    contents = [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        for content in (message["content"] for message in system)
    ]
    merged = "\n\n".join(content for content in contents if content)
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": merged}, *others]


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """Knows `{% generation %}`, which marks what the model writes and prints nothing itself."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- Does a template want the content of messages as a list of parts, or as text? -----------------------


def _loops_over_content(template: nodes.Template) -> Iterator[bool]:
    """True for each loop over what a message contains, where vLLM looks too (`_detect_content_format`)."""
    in_macros = {loop for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    messages = _names_of(template, "messages")
    items = {
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is_name(loop.iter, name) for name in messages)
    }
    for loop in template.find_all(nodes.For):
        named = isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and loop not in in_macros
        if named or any(_is_content_of(loop.iter, item) for item in items):
            yield True
    for macro in template.find_all(nodes.Macro):
        given = _parameters_with_content(template, macro, items)
        for loop in macro.find_all(nodes.For):
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                yield True


def _names_of(template: nodes.Template, variable: str) -> set[str]:
    """A variable and those that it is assigned to."""
    names = {variable}
    assignments = list(template.find_all(nodes.Assign))
    while True:
        more = {
            one.target.name
            for one in assignments
            if isinstance(one.target, nodes.Name) and any(_is_name(one.node, name) for name in names)
        } - names
        if not more:
            return names
        names |= more


def _parameters_with_content(template: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    given = set()
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            by_position = zip((argument.name for argument in macro.args), call.args, strict=False)
            by_name = ((keyword.key, keyword.value) for keyword in call.kwargs)
            for name, value in (*by_position, *by_name):
                if any(_is_content_of(value, item) for item in items):
                    given.add(name)
    return given


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """What filters, tests and slices are applied to."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _is_name(node: nodes.Node | None, name: str) -> bool:
    bare = _bare(node)
    return isinstance(bare, nodes.Name) and bare.name == name


def _is_content_of(node: nodes.Node | None, name: str) -> bool:
    bare = _bare(node)
    if isinstance(bare, nodes.Getitem):
        key = bare.arg
        return _is_name(bare.node, name) and isinstance(key, nodes.Const) and key.value == "content"
    return isinstance(bare, nodes.Getattr) and bare.attr == "content" and _is_name(bare.node, name)
