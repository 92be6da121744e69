"""One OpenAI request from its body to its last byte: /v1/completions and /v1/chat/completions.

    body → openai_requests, openai_checks → front_end.generate → openai_responses → client

A client that goes away cancels the handler, and leaving `generate` aborts the request in the engine.
Must never decide what an answer says.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from vllm_ranks.engine import openai_checks, orca
from vllm_ranks.engine.client import EngineDeadError
from vllm_ranks.engine.config import LoraModule
from vllm_ranks.engine.front_end import DataParallelRankError, FrontEnd, Generation, QueueFullError
from vllm_ranks.engine.openai_requests import (
    DEFAULT_COMPLETION_TOKENS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    read_body,
    unknown_model,
)
from vllm_ranks.engine.openai_responses import (
    DONE,
    ChatFormat,
    Choice,
    CompletionFormat,
    ResponseFormat,
    Usage,
    error_event,
)
from vllm_ranks.engine.output_processor import Collector, Delta, GenerationError
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.text import detokenize

_MAX_REQUEST_ID_CHARS = 256


class OpenAiServing:
    """The two generating endpoints of one API server."""

    def __init__(self, front_end: FrontEnd, response_headers: Callable[[str], Mapping[str, str]]) -> None:
        """`response_headers`: from the request's id, headers every answer shall carry."""
        self._front_end = front_end
        self._config = front_end.config
        self._response_headers = response_headers
        self._loras = {module.name: module for module in self._config.lora_modules}

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        request = read_body(await http.read(), CompletionRequest)
        lora = self.find_model(request.model)
        openai_checks.check_common(request)
        prompts = openai_checks.completion_prompts(request, self._config.scheduler.max_model_len)
        request_id = _request_id(http, request.request_id)
        response = CompletionFormat(
            f"cmpl-{request_id}",
            request.model or self._config.served_model_names[0],
            [detokenize(prompt) for prompt in prompts] if request.echo else None,
            request.choices,
        )
        # A null max_tokens means the default, as in vLLM.
        limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        generation = self._generation(http, request, prompts, limit, response.response_id, lora)
        if request.echo and limit == 0:
            return await self._answer_prompts_alone(http, request, generation, response)
        return await self._answer(http, request, generation, response)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        request = read_body(await http.read(), ChatRequest)
        lora = self.find_model(request.model)
        openai_checks.check_common(request)
        prompt = openai_checks.chat_tokens(request, self._config.scheduler.max_model_len)
        last = request.messages[-1]
        echo = last.content if request.echo and last.role == "assistant" else ""
        response = ChatFormat(
            f"chatcmpl-{_request_id(http, request.request_id)}",
            request.model or self._config.served_model_names[0],
            echo if isinstance(echo, str) else "",
        )
        generation = self._generation(
            http, request, [prompt], request.output_limit, response.response_id, lora
        )
        return await self._answer(http, request, generation, response)

    def find_model(self, model: str | None) -> tuple[LoraModule, int] | None:
        """The LoRA adapter a model name means, with its number; `None` for the model itself.

        Raises:
            ApiError: 404, no such model.
        """
        if not model or model in self._config.served_model_names:
            return None
        if model not in self._loras:
            raise unknown_model(model, self._config.served_model_names)
        return self._loras[model], list(self._loras).index(model) + 1

    def _generation(
        self,
        http: web.Request,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        limit: int | None,
        response_id: str,
        lora: tuple[LoraModule, int] | None,
    ) -> Generation:
        max_model_len = self._config.scheduler.max_model_len
        echo_alone = bool(request.echo) and limit == 0
        limits = [
            openai_checks.output_limit(limit, len(prompt), max_model_len, allow_zero=echo_alone)
            for prompt in prompts
        ]
        openai_checks.check_min_tokens(request.min_tokens, min(limits))
        priority = _integer_header(http, "X-Vllm-Priority", request.priority) or 0
        openai_checks.check_int64("priority", priority)
        return Generation(
            prompts=prompts,
            request_id=response_id,
            n=request.choices,
            max_tokens=limits,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop=request.stop_strings,
            include_stop_in_output=request.include_stop_str_in_output,
            seed=request.seed or 0,
            priority=priority,
            cache_salt=request.cache_salt,
            session_id=request.session_id or http.headers.get("X-Session-ID"),
            data_parallel_rank=_integer_header(http, "X-data-parallel-rank", None),
            lora=None if lora is None else lora[0],
            lora_id=0 if lora is None else lora[1],
        )

    async def _answer(
        self,
        http: web.Request,
        request: CompletionRequest | ChatRequest,
        generation: Generation,
        response: ResponseFormat,
    ) -> web.StreamResponse:
        try:
            async with self._front_end.generate(generation) as collector:
                usage = Usage(sum(map(len, generation.prompts)))
                if request.stream:
                    return await self._stream(http, request, generation, response, collector, usage)
                return await self._respond(http, generation, response, collector, usage)
        except ConnectionResetError:
            # The client has gone, and its stream was noticed closed before this handler was cancelled.
            raise asyncio.CancelledError from None
        except (EngineDeadError, GenerationError) as error:
            raise _internal_error(error) from None
        except QueueFullError as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise ApiError(str(error), status=status, kind=status.phrase) from None
        except DataParallelRankError as error:
            raise ApiError(str(error)) from None

    async def _respond(
        self,
        http: web.Request,
        generation: Generation,
        response: ResponseFormat,
        collector: Collector,
        usage: Usage,
    ) -> web.Response:
        choices = [Choice() for _ in range(len(generation.prompts) * generation.n)]
        while collector.unfinished:
            for delta in await collector.get():
                choices[delta.choice].add(delta)
                usage.completion_tokens += delta.token_count
        self._tell_cached(response, usage, collector)
        headers = {
            **self._response_headers(response.response_id),
            **orca.load_headers(
                http.headers.get(orca.REQUEST_HEADER), self._front_end.metrics.latest.values()
            ),
        }
        body = response.response(choices, usage)
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(
        self,
        http: web.Request,
        request: CompletionRequest | ChatRequest,
        generation: Generation,
        response: ResponseFormat,
        collector: Collector,
        usage: Usage,
    ) -> web.StreamResponse:
        stream = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                **self._response_headers(response.response_id),
            }
        )
        await stream.prepare(http)
        opened = False
        count_as_we_go = request.includes_continuous_usage
        prompt_tokens = [len(prompt) for prompt in generation.prompts]
        completion_tokens = [0] * (len(prompt_tokens) * generation.n)

        def chunk(delta: Delta) -> bytes:
            signed = delta.finish_reason is not None and not request.includes_usage
            return response.chunk(delta, running_usage(delta), signed=signed)

        def running_usage(delta: Delta) -> Usage | None:
            if not count_as_we_go:
                return None
            completion_tokens[delta.choice] += delta.token_count
            return Usage(prompt_tokens[delta.choice // generation.n], completion_tokens[delta.choice])

        try:
            while collector.unfinished:
                deltas = await collector.get()
                chunks = [chunk(delta) for delta in deltas]
                if not opened:
                    opening_usage = Usage(usage.prompt_tokens) if count_as_we_go else None
                    chunks.insert(0, response.opening(generation.n, opening_usage))
                    opened = True
                usage.completion_tokens += sum(delta.token_count for delta in deltas)
                await stream.write(b"".join(chunks))
            self._tell_cached(response, usage, collector)
            last = response.usage_chunk(usage) if request.includes_usage else b""
            await stream.write(last + DONE)
        except (EngineDeadError, GenerationError) as error:
            # The status line has gone out: the error is an event.
            await stream.write(error_event(_internal_error(error).body()) + DONE)
        await stream.write_eof()
        return stream

    async def _answer_prompts_alone(
        self,
        http: web.Request,
        request: CompletionRequest,
        generation: Generation,
        response: CompletionFormat,
    ) -> web.StreamResponse:
        """`echo` with `max_tokens` 0: the prompts come back, nothing is generated."""
        collector = Collector(len(generation.prompts) * generation.n)
        for choice in range(len(generation.prompts) * generation.n):
            collector.put(Delta(choice, "", 0, FinishReason.LENGTH))
        usage = Usage(sum(map(len, generation.prompts)))
        if request.stream:
            return await self._stream(http, request, generation, response, collector, usage)
        return await self._respond(http, generation, response, collector, usage)

    def _tell_cached(self, response: ResponseFormat, usage: Usage, collector: Collector) -> None:
        if self._config.server.enable_prompt_tokens_details:
            usage.cached_tokens = collector.cached_tokens
            if response.tells_created_cache:
                usage.created_cache_tokens = collector.created_cache_tokens


def _internal_error(error: Exception) -> ApiError:
    return ApiError(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR, kind="InternalServerError")


def _request_id(http: web.Request, from_body: str | None) -> str:
    """X-Request-Id, the body's request_id, or a random one."""
    given = http.headers.get("X-Request-Id") or from_body or uuid.uuid4().hex
    return given[:_MAX_REQUEST_ID_CHARS]


def _integer_header(http: web.Request, name: str, default: int | None) -> int | None:
    """An integer header; anything else in it is ignored, as in vLLM."""
    value = http.headers.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        return default
