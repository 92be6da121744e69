"""Prompts become the tokens that a rank makes of them, or stay text; no request fails for it.

That the tokens are those of vLLM itself is shown in tests/vllm/test_prompt_tokens.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from typer.testing import CliRunner

from ext_proc.facts import Tokenise, read_facts
from ext_proc.prompt_tokens import PromptTokens
from ext_proc.vocabulary import RequestFacts
from gateway.cli import main
from gateway.config import Config
from gateway.prompt_tokenizer import MAX_TEXT_CHARS, TokenizerError, tokenise_of
from vllm_ranks.tiny_moe import CHAT_TEMPLATE, write_tiny_moe

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


def config(folder: Path, **fields: Any) -> Config:
    """One adopted group with a tokenizer, and one of another model without."""
    group = {"name": "g0", "engine": "adopted", "model": "m", "endpoints": ["127.0.0.1:8000"]}
    other = {"name": "g1", "engine": "adopted", "model": "other", "endpoints": ["127.0.0.1:8001"]}
    return Config.model_validate({"groups": [{**group, "tokenizer": str(folder), **fields}, other]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return write_tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenise(folder: Path) -> Tokenise:
    found = tokenise_of(config(folder))
    assert found is not None
    return found


@pytest.fixture
def facts(tokenise: Tokenise) -> Callable[..., RequestFacts]:
    """The facts of a request with these fields."""

    def read(path: str = CHAT, **fields: Any) -> RequestFacts:
        return read_facts(path, json.dumps({"model": "m", **fields}).encode(), "r", tokenise)

    return read


@pytest.fixture(scope="module")
def encode(folder: Path) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


def same(tokens: PromptTokens | None, ids: list[int]) -> bool:
    """Whether a prompt has exactly these tokens."""
    assert tokens is not None
    return tokens.blocks(1, None) == PromptTokens(ids).blocks(1, None) and tokens.count == len(ids)


Facts = Callable[..., RequestFacts]
Encode = Callable[[str], list[int]]


def test_a_chat_is_written_as_its_template_says(facts: Facts, encode: Encode) -> None:
    read = facts(messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert same(read.tokens, encode(text))
    assert read.prompt_tokens == len(encode(text))


def test_tools_and_kwargs_reach_the_template(facts: Facts) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    plain, with_tools = facts(messages=HELLO), facts(messages=HELLO, tools=[tool])
    assert with_tools.prompt_tokens > plain.prompt_tokens + 20
    cut = facts(messages=HELLO, add_generation_prompt=False)
    assert cut.prompt_tokens < plain.prompt_tokens


def test_a_completion_is_its_text(facts: Facts, encode: Encode) -> None:
    assert same(facts(COMPLETIONS, prompt="Once upon a time").tokens, encode("Once upon a time"))
    assert same(facts(COMPLETIONS, prompt=["Once upon a time"]).tokens, encode("Once upon a time"))


def test_a_completion_of_tokens_is_taken_as_it_is(facts: Facts) -> None:
    assert same(facts(COMPLETIONS, prompt=[1, 2, 3]).tokens, [1, 2, 3])
    assert same(facts(COMPLETIONS, prompt=[[1, 2, 3]]).tokens, [1, 2, 3])


def test_several_prompts_are_estimated_and_not_looked_for(facts: Facts) -> None:
    read = facts(COMPLETIONS, prompt=["Once", "upon a time"])
    assert read.tokens is None
    assert read.prompt_tokens == 4


def test_a_salt_makes_other_blocks(facts: Facts) -> None:
    plain, salted = facts(messages=HELLO), facts(messages=HELLO, cache_salt="mine")
    assert plain.tokens is not None
    assert salted.tokens is not None
    assert set(plain.tokens.blocks(2, None)).isdisjoint(salted.tokens.blocks(2, None))


def test_special_tokens_are_added_where_the_request_says_so(tmp_path: Path) -> None:
    folder = write_tiny_moe(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    end = tokenizer["added_tokens"][0]
    special = {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end["content"], "type_id": 0}}, first],
        "pair": [first, second],
        "special_tokens": {end["content"]: special},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokenise = tokenise_of(config(folder))

    def length(path: str, **fields: Any) -> int:
        return read_facts(path, json.dumps({"model": "m", **fields}).encode(), "r", tokenise).prompt_tokens

    completion, chat = {"prompt": "Once"}, {"messages": HELLO}
    assert (
        length(COMPLETIONS, **completion) == length(COMPLETIONS, **completion, add_special_tokens=False) + 1
    )
    assert length(CHAT, **chat) == length(CHAT, **chat, add_special_tokens=True) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}
            ]
        },
        {"messages": HELLO, "chat_template": "{{ messages }}"},
        {"messages": HELLO, "continue_final_message": True},
        {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}},
        {"messages": HELLO, "truncate_prompt_tokens": 4},
        {"messages": [{"role": "user"}, "nonsense"]},
        {"messages": [{"content": "no role"}]},
        {"messages": []},
        {"messages": HELLO, "tools": [7]},
    ],
    ids=lambda fields: next(iter([name for name in fields if name != "messages"]), "messages"),
)
def test_what_cannot_be_known_for_certain_stays_text(facts: Facts, fields: Any) -> None:
    assert facts(**fields).tokens is None


@pytest.mark.parametrize("prompt", [None, 7, [], [1, "a"], ["a", 1], [-1], [1 << 32], {"a": 1}], ids=str)
def test_a_completion_that_is_none_stays_text(facts: Facts, prompt: Any) -> None:
    assert facts(COMPLETIONS, prompt=prompt).tokens is None


def test_other_calls_and_groups_without_a_tokenizer_stay_text(facts: Facts) -> None:
    assert facts("/v1/embeddings", input="Once").tokens is None
    assert facts(messages=HELLO, model="other").tokens is None
    assert facts(messages=HELLO, model="a name that no group has").tokens is not None


def test_a_very_long_prompt_is_known_by_its_beginning(facts: Facts, encode: Encode) -> None:
    text = "Once upon a time " * (MAX_TEXT_CHARS // 8)
    read = facts(COMPLETIONS, prompt=text)
    ids = encode(text)
    assert read.tokens is not None
    known = len(read.tokens.blocks(64, None)) * 64
    assert 0.4 * len(ids) < known < 0.6 * len(ids)
    assert read.tokens.blocks(64, None) == PromptTokens(ids[:known]).blocks(64, None)
    assert read.prompt_tokens == pytest.approx(len(ids), rel=0.01)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
_message = st.fixed_dictionaries(
    {"role": _json, "content": _json}, optional={"tool_calls": _json, "name": _json}
)


@given(
    st.lists(_message | _json, max_size=3),
    st.dictionaries(st.sampled_from(["tools", "chat_template_kwargs", "documents", "cache_salt"]), _json),
)
def test_no_chat_breaks_the_reading(tokenise: Tokenise, messages: Any, more: Any) -> None:
    body = json.dumps({"messages": messages, **more}).encode()
    assert read_facts(CHAT, body, "r", tokenise).prompt_tokens >= 0


@given(st.binary())
def test_no_bytes_break_the_reading(tokenise: Tokenise, body: bytes) -> None:
    assert read_facts(CHAT, body, "r", tokenise).tokens is None


# --- The folder ---------------------------------------------------------------------------------------


def test_a_folder_without_a_chat_template_serves_completions_alone(tmp_path: Path) -> None:
    folder = write_tiny_moe(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenise = tokenise_of(config(folder))
    assert read_facts(COMPLETIONS, b'{"model": "m", "prompt": "Once"}', "r", tokenise).tokens is not None
    assert read_facts(CHAT, json.dumps({"messages": HELLO}).encode(), "r", tokenise).tokens is None


def test_a_template_may_be_a_file_of_its_own_or_one_of_several(tmp_path: Path) -> None:
    folder = write_tiny_moe(tmp_path)
    body = json.dumps({"messages": HELLO}).encode()
    expected = read_facts(CHAT, body, "r", tokenise_of(config(folder))).prompt_tokens
    several = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_facts(CHAT, body, "r", tokenise_of(config(folder))).prompt_tokens == expected
    with_tools = json.dumps({"messages": HELLO, "tools": []}).encode()
    assert read_facts(CHAT, with_tools, "r", tokenise_of(config(folder))).prompt_tokens < expected
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert read_facts(CHAT, with_tools, "r", tokenise_of(config(folder))).prompt_tokens == expected


def test_models_whose_chats_vllm_writes_by_code_of_its_own_have_completions_alone(tmp_path: Path) -> None:
    folder = write_tiny_moe(tmp_path)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    tokenise = tokenise_of(config(folder))
    assert read_facts(CHAT, json.dumps({"messages": HELLO}).encode(), "r", tokenise).tokens is None


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (None, "", "cannot read .*tokenizer.json: No such file"),
        ("tokenizer.json", "{}", "holds no tokenizer that can be used"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is no JSON object"),
        ("chat_template.jinja", "{% for %}", "the chat template in .* is none"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named_with_its_field(
    tmp_path: Path, file: str | None, content: str, said: str
) -> None:
    if file is not None:
        write_tiny_moe(tmp_path)
        (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=rf"^groups\[0\]\.tokenizer: .*{said}"):
        tokenise_of(config(tmp_path))


def test_a_missing_library_is_named_with_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'wavegate\[tokenizer\]'"):
        tokenise_of(config(folder))


def test_all_that_need_a_tokenizer_say_what_is_wrong_with_it_before_they_start(tmp_path: Path) -> None:
    file = tmp_path / "wavegate.yaml"
    file.write_text(
        "groups: [{engine: adopted, name: g, model: m, endpoints: ['127.0.0.1:1'], tokenizer: nowhere}]\n"
    )
    for command in (["config", "check"], ["gateway"], ["up", "--run-dir", str(tmp_path / "run")]):
        result = CliRunner().invoke(main, [*command, "-c", str(file)])
        assert result.exit_code == 2
        assert "groups[0].tokenizer: cannot read nowhere/tokenizer.json" in result.output


def test_groups_of_one_model_must_have_the_same_tokenizer(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"groups\[1\]\.tokenizer: must be that of groups\[0\].*'other'"):
        config(folder, other_names=["other"])


def test_without_tokenizers_prompts_stay_text() -> None:
    plain = {"name": "g0", "engine": "embedded"}
    assert tokenise_of(Config.model_validate({"groups": [plain]})) is None
