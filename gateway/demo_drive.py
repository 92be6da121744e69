"""Drives a gateway with the official `openai` client: all kinds of calls, prompts of very different length.

Knows nothing of ranks but the header that names the one that answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from openai import AsyncOpenAI, AsyncStream, OpenAIError
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletionChunk

from gateway.envoy_route import RANK_HEADER

REQUEST_TIMEOUT_S = 120.0
PROMPT_WORDS = (12, 3000, 60, 12, 600, 200, 12, 1500)
"""Words of the prompts, in turn; neighbours differ by more than two orders of magnitude."""
MAX_TOKENS = (16, 48, 32, 24, 64)

_KINDS = ("chat", "chat, streamed", "completion", "completion, streamed")
_WORDS = ("wave", "gate", "rank", "group", "queue", "token", "prefill", "decode", "batch", "cache", "step")


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request to make."""

    number: int
    kind: str
    """One of `chat`, `completion`, with `, streamed` or without."""
    prompt: str
    max_tokens: int

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as server-sent events."""
        return self.kind.endswith("streamed")

    @property
    def is_chat(self) -> bool:
        """Whether it calls /v1/chat/completions."""
        return self.kind.startswith("chat")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What became of one request."""

    request: DemoRequest
    rank: str | None = None
    """Which rank answered, by its own response header."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """Time to the first piece of a stream; None for an answer in one piece."""
    total_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    rank: str | None
    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float | None = None


def demo_requests(count: int) -> list[DemoRequest]:
    """`count` different requests, always the same ones."""
    turns = zip(cycle(_KINDS), cycle(PROMPT_WORDS), cycle(MAX_TOKENS), strict=False)
    return [
        DemoRequest(number, kind, _prompt(number, words), max_tokens)
        for number, (kind, words, max_tokens) in enumerate(islice(turns, count), start=1)
    ]


def _prompt(number: int, words: int) -> str:
    text = " ".join(islice(cycle(_WORDS[number % len(_WORDS) :] + _WORDS), words))
    return f"Request {number}. Continue this text: {text}"


async def drive(
    base_url: str,
    model: str,
    requests: Sequence[DemoRequest],
    *,
    concurrency: int,
    on_result: Callable[[DemoResult], None],
) -> list[DemoResult]:
    """Make all requests, at most `concurrency` at a time; the results in the order in which they ended.

    Retries of the client are off: what fails, shows.
    """
    waiting = iter(requests)
    results: list[DemoResult] = []

    async def worker(client: AsyncOpenAI) -> None:
        for request in waiting:
            result = await _make(client, model, request)
            results.append(result)
            on_result(result)

    async with (
        AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        ) as client,
        asyncio.TaskGroup() as workers,
    ):
        for _ in range(concurrency):
            workers.create_task(worker(client))
    return results


async def _make(client: AsyncOpenAI, model: str, request: DemoRequest) -> DemoResult:
    started_s = time.perf_counter()
    call = _streamed if request.is_streamed else _whole
    try:
        answer = await call(client, model, request, started_s)
    except OpenAIError as error:
        return DemoResult(request, total_s=time.perf_counter() - started_s, error=str(error) or repr(error))
    return DemoResult(
        request,
        rank=answer.rank,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        first_token_s=answer.first_token_s,
        total_s=time.perf_counter() - started_s,
        error=_fault(answer),
    )


def _fault(answer: _Answer) -> str | None:
    if answer.rank is None:
        return f"the answer has no {RANK_HEADER} header"
    if answer.finish_reason not in {"stop", "length"}:
        return f"the answer ended with finish_reason {answer.finish_reason}"
    if not answer.text or answer.completion_tokens < 1 or answer.prompt_tokens < 1:
        return "the answer is empty or says nothing of its usage"
    return None


async def _whole(client: AsyncOpenAI, model: str, request: DemoRequest, _started_s: float) -> _Answer:
    if request.is_chat:
        raw = await client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": request.prompt}], max_tokens=request.max_tokens
        )
        chat = raw.parse()
        choice, text, usage = chat.choices[0], chat.choices[0].message.content, chat.usage
        return _answer(raw.headers.get(RANK_HEADER), text, choice.finish_reason, usage)
    raw_completion = await client.completions.with_raw_response.create(
        model=model, prompt=request.prompt, max_tokens=request.max_tokens
    )
    completion = raw_completion.parse()
    first = completion.choices[0]
    rank = raw_completion.headers.get(RANK_HEADER)
    return _answer(rank, first.text, first.finish_reason, completion.usage)


async def _streamed(client: AsyncOpenAI, model: str, request: DemoRequest, started_s: float) -> _Answer:
    pieces: list[str] = []
    first_token_s: float | None = None
    finish_reason: str | None = None
    usage: CompletionUsage | None = None
    rank, stream = await _open_stream(client, model, request)
    async for piece, reason, reported in stream:
        if piece and first_token_s is None:
            first_token_s = time.perf_counter() - started_s
        pieces.append(piece)
        finish_reason = reason or finish_reason
        usage = reported or usage
    return _answer(rank, "".join(pieces), finish_reason, usage, first_token_s)


_Piece = tuple[str, str | None, CompletionUsage | None]


async def _open_stream(
    client: AsyncOpenAI, model: str, request: DemoRequest
) -> tuple[str | None, AsyncIterator[_Piece]]:
    """The rank that answers, and the pieces of its answer: text, finish reason, usage."""
    if request.is_chat:
        raw = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": request.prompt}],
            max_tokens=request.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        return raw.headers.get(RANK_HEADER), _chat_pieces(raw.parse())
    raw_completion = await client.completions.with_raw_response.create(
        model=model,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    return raw_completion.headers.get(RANK_HEADER), _completion_pieces(raw_completion.parse())


async def _chat_pieces(stream: AsyncStream[ChatCompletionChunk]) -> AsyncIterator[_Piece]:
    async for chunk in stream:
        choice = chunk.choices[0] if chunk.choices else None
        text = (choice.delta.content or "") if choice else ""
        yield text, choice.finish_reason if choice else None, chunk.usage


async def _completion_pieces(stream: AsyncStream[Completion]) -> AsyncIterator[_Piece]:
    async for chunk in stream:
        choice = chunk.choices[0] if chunk.choices else None
        yield choice.text if choice else "", choice.finish_reason if choice else None, chunk.usage


def _answer(
    rank: str | None,
    text: str | None,
    finish_reason: str | None,
    usage: CompletionUsage | None,
    first_token_s: float | None = None,
) -> _Answer:
    return _Answer(
        rank=rank,
        text=text or "",
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        first_token_s=first_token_s,
    )
