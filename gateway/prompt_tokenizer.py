"""Makes tokens of prompts as the ranks do, with the model's own tokenizer: for groups whose field `tokenizer`
names its folder.

Reads the folder once, at the start. Must never fail a request: what cannot be made with certainty is left to
the estimate from the prompt's text. The libraries come with `pip install 'wavegate[tokenizer]'`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ext_proc.facts import Tokenise
from ext_proc.prompt_tokens import PromptTokens
from ext_proc.vocabulary import CallKind, RequestFacts
from gateway.config import Config, tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from gateway.chat_template import ChatTemplate

log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 256 * 1024
"""Of a longer text only so much is made into tokens: 0.1 s in which nothing else is decided."""
UNSURE_TOKENS = 16
"""Tokens at the end of a text that was cut which may be others in the whole text."""
OTHER_TEMPLATES = ("gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3")
"""Values of `model_type` whose chats vLLM 0.32 writes by code of its own (vllm/renderers, harmony)."""
MAX_FILE_BYTES = 256 << 20

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CHANGED_BY_SERVER = ("truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs")


class TokenizerError(Exception):
    """A tokenizer cannot be used; the message names the configuration's field and what to do."""


class PromptTokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate]) -> None:
        """`templates`: `default`, and `tool_use` if chats with tools have one of their own."""
        self._tokenizer = tokenizer
        self._templates = templates

    def tokens(self, facts: RequestFacts, body: bytes) -> PromptTokens | None:
        """The prompt of a whole request; `None` if what the rank makes of it is not certain."""
        try:
            request = msgspec.json.decode(body)
            if not isinstance(request, dict) or any(
                request.get(name) is not None for name in _CHANGED_BY_SERVER
            ):
                return None
            salt = request.get("cache_salt")
            if not (salt is None or isinstance(salt, str)):
                return None
            ids, count = self._prompt(facts.kind, request)
            return PromptTokens(ids, cache_salt=salt, count=count)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            log.debug("request %s: prompt not known as tokens: %s", facts.request_id, error)
            return None

    def _prompt(self, kind: CallKind, request: Mapping[str, Any]) -> tuple[list[int], int]:
        """The tokens of a prompt as far as they are certain, and how many there are in all.

        Raises ValueError or TypeError for all that is not one prompt of text or tokens: several are several
        requests to the engine, of which only their length is of use, and that is estimated.
        """
        if kind is CallKind.CHAT and self._templates:
            default = self._templates.get("default")
            template = (
                self._templates.get("tool_use", default) if request.get("tools") is not None else default
            )
            if template is None:
                raise ValueError("no chat template for this request")
            return self._encode(template.render(request), request.get("add_special_tokens", False))
        if kind is not CallKind.COMPLETION:
            raise ValueError(f"a call of another kind: {kind.value}")
        prompt = request.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not _is_id(prompt[0]):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return self._encode(prompt, request.get("add_special_tokens", True))
        if isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
            return prompt, len(prompt)
        raise ValueError("not one prompt of text or tokens")

    def _encode(self, text: str, adds_special_tokens: object) -> tuple[list[int], int]:
        head = text[:MAX_TEXT_CHARS]
        ids = self._tokenizer.encode(head, add_special_tokens=adds_special_tokens is True).ids
        if len(head) == len(text):
            return ids, len(ids)
        return ids[:-UNSURE_TOKENS], len(ids) * len(text) // len(head)


def _is_id(value: object) -> bool:
    return type(value) is int


def tokenise_of(config: Config) -> Tokenise | None:
    """What makes tokens of the prompts for a configuration's groups; `None` if no group has a tokenizer.

    Raises:
        TokenizerError: a folder cannot be used, or the libraries are not installed.
    """
    by_folder: dict[Path, PromptTokenizer] = {}
    by_model: dict[str, PromptTokenizer | None] = {}
    for position, group in enumerate(config.groups):
        folder = tokenizer_of(group)
        if folder is not None and folder not in by_folder:
            by_folder[folder] = _load(folder, f"groups[{position}].tokenizer")
        for name in (group.model, *group.other_names):
            by_model.setdefault(name, by_folder[folder] if folder is not None else None)
    if not by_folder:
        return None
    # A name that no group has goes to the first one's pool.
    default = by_model[config.groups[0].model]

    def tokenise(facts: RequestFacts, body: bytes) -> PromptTokens | None:
        tokenizer = by_model.get(facts.model, default) if facts.model is not None else default
        return tokenizer.tokens(facts, body) if tokenizer is not None else None

    return tokenise


def _load(folder: Path, field: str) -> PromptTokenizer:
    try:
        import jinja2
        import tokenizers

        from gateway.chat_template import ChatTemplate
    except ImportError as error:
        raise TokenizerError(
            f"{field}: needs the library {error.name}, which is not installed; "
            "run pip install 'wavegate[tokenizer]', or leave the field out"
        ) from None
    try:
        settings = _read_json(folder / "tokenizer_config.json")
        model_type = _read_json(folder / "config.json").get("model_type")
        sources = {} if model_type in OTHER_TEMPLATES else _template_sources(folder, settings)
        tokenizer = tokenizers.Tokenizer.from_buffer(_read(folder / "tokenizer.json"))
    except OSError as error:
        raise TokenizerError(f"{field}: cannot read {error.filename}: {error.strerror}") from None
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"{field}: {folder} holds no tokenizer that can be used: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {name: _content(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name)}
    try:
        templates = {name: ChatTemplate(source, special) for name, source in sources.items()}
    except jinja2.TemplateError as error:
        raise TokenizerError(f"{field}: the chat template in {folder} is none: {error}") from None
    return PromptTokenizer(tokenizer, templates)


def _template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by their names, in newer folders a file of its own; without any, chats stay text."""
    try:
        return {"default": _read(folder / "chat_template.jinja").decode()}
    except FileNotFoundError:
        source = settings.get("chat_template")
    if isinstance(source, list):
        return {one["name"]: one["template"] for one in source}
    return {"default": source} if isinstance(source, str) else {}


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file."""
    try:
        value = json.loads(_read(path))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return value


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data
