"""Bodies of the OpenAI API as plain data, read as vLLM 0.32 reads them (entrypoints/openai/*/protocol.py).

Unknown fields are accepted, numbers may be written as strings; a field of the wrong type is a 400 that
names it. Must never judge a value: `openai_checks` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

DEFAULT_COMPLETION_TOKENS = 16


class ApiError(Exception):
    """An answer other than 200, in OpenAI's error format."""

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": int(self.status)}
        return {"error": error}


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream reports besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of request."""

    model: str | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    prompt_logprobs: int | None = None

    @property
    def choices(self) -> int:
        """`n`, which may be null."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> list[str]:
        """`stop`, which may be a string, a list or null."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        """The stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Every chunk of the stream carries usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False

    @property
    def output_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(msgspec.Struct, frozen=True):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


_Body = TypeVar("_Body")


def read_body(body: bytes, kind: type[_Body]) -> _Body:
    """Decode a JSON body.

    Raises:
        ApiError: it is no JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(str(error), param=_parameter_of(str(error))) from None
    except msgspec.DecodeError as error:
        raise ApiError(f"The request body is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise ApiError("The request body is not valid UTF-8") from None


def _parameter_of(message: str) -> str | None:
    """`stop` of "Expected `str`, got `int` - at `$.stop[0]`"."""
    _, separator, path = message.partition("at `$.")
    return path.split("[")[0].split(".")[0].rstrip("`") if separator else None


def unknown_model(model: str, served_names: Sequence[str]) -> ApiError:
    """The 404 of a model this server does not have, in vLLM's words."""
    return ApiError(
        f"The model `{model}` does not exist. Valid aliases: {', '.join(served_names)}.",
        status=HTTPStatus.NOT_FOUND,
        kind="NotFoundError",
        param="model",
    )
