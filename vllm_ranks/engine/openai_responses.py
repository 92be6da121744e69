"""Answers of the OpenAI API: one format object per request writes its chunks or its whole response.

Chunks are assembled from parts encoded once per request: a rank streams thousands of them per second.
Fields and their order are vLLM 0.32's. Must never wait or decide.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from vllm_ranks.engine.output_processor import Delta
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.version import SERVER_HEADER

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode
_SIGNATURE = b',"system_fingerprint":' + _json(SERVER_HEADER)
_FINISH_JSON: dict[FinishReason | None, bytes] = {
    None: b"null",
    **{reason: _json(reason.name.lower()) for reason in FinishReason},
}


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Found in the prefix cache; `None`: not to be told."""
    created_cache_tokens: int | None = None
    """Written to the prefix cache; told in answers to chats only, as in vLLM."""

    def as_dict(self) -> dict[str, Any]:
        """The `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            details = {"cached_tokens": self.cached_tokens}
            if self.created_cache_tokens is not None:
                details["created_cache_tokens"] = self.created_cache_tokens
            usage["prompt_tokens_details"] = details
        return usage


@dataclass(slots=True)
class Choice:
    """One finished choice of a response that is not streamed."""

    parts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """Everything that was generated."""
        return "".join(self.parts)

    def add(self, delta: Delta) -> None:
        """Append what a step added."""
        self.parts.append(delta.text)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class ResponseFormat(Protocol):
    """How one kind of request is answered."""

    response_id: str
    tells_created_cache: bool

    def opening(self, choices: int, usage: Usage | None) -> bytes:
        """Chunks before the first token; `usage` if every chunk shall carry it."""

    def chunk(self, delta: Delta, usage: Usage | None, *, signed: bool) -> bytes:
        """One server-sent event with a delta; `signed`: no usage chunk follows that says who answered."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event of a stream that reports usage."""

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of a response that is not streamed."""


class _Format:
    """What both kinds share: id, object name, time and model of every chunk."""

    def __init__(self, response_id: str, model: str, chunk_object: str, response_object: str) -> None:
        self.response_id = response_id
        self._model = model
        self._created = int(time.time())
        self._chunk_object = chunk_object
        self._response_object = response_object
        head = _json(self._head(chunk_object))
        self._chunk_start = b"data: " + head[:-1] + b',"choices":['

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }

    def _event(self, choice: bytes, usage: Usage | None, *, signed: bool = False) -> bytes:
        signature = _SIGNATURE if signed else b""
        if usage is None:
            return b"".join((self._chunk_start, choice, b"]", signature, b"}\n\n"))
        usage_json = _json(usage.as_dict())
        return b"".join((self._chunk_start, choice, b'],"usage":', usage_json, signature, b"}\n\n"))

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(b"", usage, signed=True)

    def _response(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return _json(
            {
                **self._head(self._response_object),
                "choices": choices,
                "system_fingerprint": SERVER_HEADER,
                "usage": usage.as_dict(),
            }
        )


class CompletionFormat(_Format):
    """Answers of /v1/completions; with `echo` each choice begins with its prompt."""

    tells_created_cache = False

    def __init__(
        self, response_id: str, model: str, echoes: Sequence[str] | None, choices_per_prompt: int
    ) -> None:
        super().__init__(response_id, model, "text_completion", "text_completion")
        self._echoes = echoes
        self._per_prompt = choices_per_prompt
        self._echoed: set[int] = set()

    def opening(self, choices: int, usage: Usage | None) -> bytes:
        return b""

    def chunk(self, delta: Delta, usage: Usage | None, *, signed: bool) -> bytes:
        return self._event(
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
            % (
                delta.choice,
                _json(self._echo(delta.choice) + delta.text),
                _FINISH_JSON[delta.finish_reason],
                _json(delta.stop_reason),
            ),
            usage,
            signed=signed,
        )

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return self._response(
            [
                {
                    "index": index,
                    "text": self._echo(index) + choice.text,
                    "logprobs": None,
                    "finish_reason": _name(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _echo(self, choice: int) -> str:
        if self._echoes is None or choice in self._echoed:
            return ""
        self._echoed.add(choice)
        return self._echoes[choice // self._per_prompt]


class ChatFormat(_Format):
    """Answers of /v1/chat/completions; a stream opens with a chunk that names the role."""

    tells_created_cache = True

    def __init__(self, response_id: str, model: str, echo: str) -> None:
        super().__init__(response_id, model, "chat.completion.chunk", "chat.completion")
        self._echo = echo

    def opening(self, choices: int, usage: Usage | None) -> bytes:
        return b"".join(
            self._event(
                b'{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}'
                % (index, _json(self._echo)),
                usage,
            )
            for index in range(choices)
        )

    def chunk(self, delta: Delta, usage: Usage | None, *, signed: bool) -> bytes:
        stop = b"" if delta.finish_reason is None else b',"stop_reason":' + _json(delta.stop_reason)
        return self._event(
            b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b%b}'
            % (delta.choice, _json(delta.text), _FINISH_JSON[delta.finish_reason], stop),
            usage,
            signed=signed,
        )

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return self._response(
            [
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": self._echo + choice.text,
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                        "function_call": None,
                        "reasoning": None,
                    },
                    "logprobs": None,
                    "finish_reason": _name(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )


def _name(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.name.lower()


def error_event(body: dict[str, Any]) -> bytes:
    """An error inside a stream that has begun."""
    return b"data: " + _json(body) + b"\n\n"
