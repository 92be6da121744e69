"""Chats are written as prompts letter for letter as vLLM writes them, or not at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gateway.chat_template import CannotRender, ChatTemplate
from tests.builders_vllm import ask_vllm
from vllm_ranks.tiny_moe import CHAT_TEMPLATE, END_OF_TEXT, write_tiny_moe

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

EVERYTHING = """
{{- pad_token }}
{%- if tools %}{{ '[tools]' + (tools | tojson) }}{% endif %}
{%- for message in messages %}
    {{- '[' + message.role + ']' }}
    {%- if message.name %}{{ '(' + message.name + ')' }}{% endif %}
    {%- if message.reasoning_content %}{{ '<' + message.reasoning_content + '>' }}{% endif %}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}{{ call.function.name + (call.function.arguments | tojson) }}
    {%- endfor %}
    {%- if message.tool_call_id %}{{ '=' + message.tool_call_id }}{% endif %}
{%- endfor %}
{%- if documents %}{{ documents | tojson(indent=1) }}{% endif %}
{%- if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}
{%- if add_generation_prompt %}[assistant]{% endif %}
"""
"""Prints all it is given."""

PARTS = """
{%- for message in messages %}
[{{ message['role'] }}]
  {%- for part in message['content'] if part.type == 'text' %}{{ part.text }}|{% endfor %}
  {%- generation %}{{ loop.index }}{% endgeneration %}
  {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
"""
"""Wants the content of messages as parts, and uses what Jinja has only by extensions."""

MACRO = """
{%- macro visible(given) %}{% if given is string %}{{ given }}{% else %}{% for one in given %}({{ one.text }})
{%- endfor %}{% endif %}{% endmacro %}
{%- set kept = messages[1:] %}
{%- for message in kept %}[{{ message.role }}]{{ visible(message.content) }}{% endfor %}
"""
"""Looks at parts in a macro."""

STRICT = """
{%- if messages[0]['role'] == 'system' %}
{{ messages[0]['content'] | trim }}{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('one by one') }}{% endif %}
{{ message['role'] + ': ' + message['content'] }}
{%- endfor %}
"""
"""Refuses what does not alternate."""

DEVELOPER = '{% for message in messages %}{{ message.role == "developer" }}{{ message.content }}{% endfor %}'

TEMPLATES = (CHAT_TEMPLATE, EVERYTHING, PARTS, MACRO, STRICT, DEVELOPER)

SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": "What is it like in 東京 <&\"'>?"}
TOOL = {
    "type": "function",
    "function": {
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "<where> é"}},
        },
        "description": "Tells the weather",
        "name": "weather",
    },
}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "strict": True, "unheard_of": 1}, "more": 2}


def call(arguments: Any) -> dict[str, Any]:
    """What an assistant said that calls a tool."""
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "call-1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def text(*texts: str) -> list[dict[str, str]]:
    """Content in parts."""
    return [{"type": "text", "text": one} for one in texts]


RESULT = {"role": "tool", "tool_call_id": "call-1", "content": text("20 °C", "sunny")}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [SYSTEM, USER]},
    {"messages": [SYSTEM, USER, {"role": "assistant", "content": "Fine."}, {**USER, "name": "Ann"}]},
    {"messages": [USER, USER]},
    {"messages": [{**USER, "content": text("one", "two")}]},
    {"messages": [{**SYSTEM, "content": text("one", "two")}, USER]},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [USER], "tools": [TOOL]},
    {"messages": [USER], "tools": [TOOL, STRICT_TOOL], "tool_choice": "auto"},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    {"messages": [USER], "tools": [{**TOOL, "defer_loading": True}]},
    {"messages": [USER, call('{"place": "Tokyo"}'), RESULT], "tools": [TOOL]},
    {"messages": [USER, call("no json"), {**RESULT, "content": "20"}]},
    {"messages": [USER, call("[1]"), RESULT]},
    {"messages": [USER, call(""), RESULT]},
    {"messages": [USER, {"role": "assistant", "content": "Hm.", "tool_calls": []}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "So.", "reasoning_content": "why"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "So.", "reasoning": "because"}, USER]},
    {"messages": [{"role": "developer", "content": "Be exact."}, USER]},
    {"messages": [SYSTEM, {"role": "developer", "content": "Be exact."}, USER]},
    {"messages": [USER, {"role": "developer", "content": text("Be", "exact.")}, SYSTEM]},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "unused": 1}},
    {"messages": [USER], "reasoning_effort": "low"},
    {"messages": [USER], "reasoning_effort": "none"},
    {"messages": [USER], "documents": [{"title": "t", "text": "é"}]},
    {"messages": [{**SYSTEM, "content": "x-anthropic-billing-header: cch=1;\nBe kind."}, USER]},
    {"messages": [{**SYSTEM, "content": text("x-anthropic-billing-header: cch=1;", "Be kind.")}, USER]},
]


@pytest.fixture(scope="module")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> list[list[str | None]]:
    """What vLLM writes, for each template, of each chat."""
    folder = write_tiny_moe(tmp_path_factory.mktemp("model"))
    question = {"folder": str(folder), "templates": TEMPLATES, "requests": CHATS}
    answer: list[list[str | None]] = ask_vllm("chat_prompts", question)
    return answer


def ours(template: str, chat: dict[str, Any]) -> str | None:
    try:
        return ChatTemplate(template, {"pad_token": END_OF_TEXT}).render(copy.deepcopy(chat))
    except CannotRender:
        return None


@pytest.mark.parametrize("number", range(len(CHATS)))
@pytest.mark.parametrize("template", range(len(TEMPLATES)))
def test_a_chat_is_written_as_vllm_writes_it(
    vllms: list[list[str | None]], template: int, number: int
) -> None:
    assert ours(TEMPLATES[template], CHATS[number]) == vllms[template][number]


def test_vllm_has_written_most_of_them(vllms: list[list[str | None]]) -> None:
    refused = sum(one is None for row in vllms for one in row)
    assert 0 < refused < len(CHATS)
