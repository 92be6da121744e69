"""The HTTP side of a rank: routes, errors, headers. What a request is answered is decided elsewhere.

aiohttp on a socket that was bound before the engines started: until the whole group is ready nothing
listens, so a load balancer sees refused connections, as with vLLM.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from vllm_ranks.engine import faults, metrics
from vllm_ranks.engine.front_end import FrontEnd
from vllm_ranks.engine.openai_checks import message_tokens
from vllm_ranks.engine.openai_requests import ApiError, DetokenizeRequest, TokenizeRequest, read_body
from vllm_ranks.engine.openai_serving import OpenAiServing
from vllm_ranks.engine.text import detokenize, token_bytes, tokenize
from vllm_ranks.engine.version import NOTICE, SERVER_HEADER, VERSION

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
CUT_AFTER_S = 0.01
"""Time for handlers to end once the server stops: connections are cut, as by vLLM. 0 means no limit."""


class ApiServer:
    """The application of one API server."""

    def __init__(self, front_end: FrontEnd, fault_injection: faults.FaultInjection | None) -> None:
        """`fault_injection`: `None` unless the rank was started with --enable-fault-injection."""
        self._front_end = front_end
        self._config = front_end.config
        self._faults = fault_injection
        self._serving = OpenAiServing(front_end, self._response_headers)
        self._started_s = int(time.time())
        self._load = 0
        self.app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
        self.app.on_response_prepare.append(_say_who_answers)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._generating(self._serving.completions)),
                web.post("/v1/chat/completions", self._generating(self._serving.chat_completions)),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.post("/ping", self._health),
                web.get("/version", self._version),
                web.get("/load", self._server_load),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._kv_event_sources),
            ]
        )
        if fault_injection is not None:
            self.app.add_routes(
                [
                    web.get(faults.PATH, fault_injection.show),
                    web.post(faults.PATH, fault_injection.switch),
                ]
            )

    async def listen(self, listener: socket.socket) -> web.AppRunner:
        """Start answering on a bound socket; `cleanup()` of the result cuts every connection."""
        runner = web.AppRunner(
            self.app,
            handler_cancellation=True,  # a client that has gone must free the engine at once
            access_log=None,
            shutdown_timeout=CUT_AFTER_S,
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=2_048).start()
        return runner

    def _generating(self, handler: Handler) -> Handler:
        async def counted(request: web.Request) -> web.StreamResponse:
            self._load += 1
            try:
                if self._faults is not None:
                    await self._faults.before_answer()
                return await handler(request)
            finally:
                self._load -= 1

        return counted

    def _response_headers(self, request_id: str) -> Mapping[str, str]:
        return {"X-Request-Id": request_id} if self._config.server.enable_request_id_headers else {}

    async def _models(self, request: web.Request) -> web.Response:
        max_model_len = self._config.scheduler.max_model_len
        cards = [
            self._model_card(name, self._config.model, None, max_model_len)
            for name in self._config.served_model_names
        ]
        base = self._config.served_model_names[0]
        cards += [self._model_card(lora.name, lora.path, base, None) for lora in self._config.lora_modules]
        return web.json_response({"object": "list", "data": cards})

    def _model_card(
        self, name: str, root: str, parent: str | None, max_model_len: int | None
    ) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": SERVER_HEADER,
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [],
        }

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), TokenizeRequest)
        self._serving.find_model(body.model)
        if body.messages is not None:
            tokens = message_tokens(body.messages, body.add_generation_prompt)
        elif body.prompt is not None:
            tokens = tokenize(body.prompt)
        else:
            raise ApiError("Either prompt or messages must be provided.", param="prompt")
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._config.scheduler.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = [token_bytes(token).decode("utf-8", "replace") for token in tokens]
        return _json_response(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), DetokenizeRequest)
        self._serving.find_model(body.model)
        try:
            return _json_response({"prompt": detokenize(body.tokens)})
        except ValueError as error:
            raise ApiError(str(error), param="tokens") from None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(
            status=HTTPStatus.OK if self._front_end.healthy else HTTPStatus.SERVICE_UNAVAILABLE
        )

    async def _version(self, request: web.Request) -> web.Response:
        return _json_response({"version": VERSION, "engine": "embedded", "notice": NOTICE})

    async def _server_load(self, request: web.Request) -> web.Response:
        tracked = self._config.server.enable_server_load_tracking
        return _json_response({"server_load": self._load if tracked else 0})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._front_end.metrics.expose(), headers={"Content-Type": metrics.CONTENT_TYPE}
        )

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        sources = {
            str(rank): ready.kv_events_config
            for rank, ready in self._front_end.client.ready.items()
            if ready.kv_events_config is not None
        }
        return _json_response(sources)


def _json_response(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


async def _say_who_answers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = f"{SERVER_HEADER}/{VERSION}"


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's format; 404 and 405 too."""
    try:
        return await handler(request)
    except ApiError as error:
        return _json_response(error.body(), error.status)
    except web.HTTPException as error:
        if error.status < HTTPStatus.BAD_REQUEST:
            raise
        status = HTTPStatus(error.status)
        answer = ApiError(status.phrase, status=status, kind=status.phrase)
        return _json_response(answer.body(), status)
    except Exception:
        if request.transport is None or request.transport.is_closing():
            raise
        logger.exception("%s %s failed", request.method, request.path)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        answer = ApiError("Internal server error", status=status, kind="InternalServerError")
        return _json_response(answer.body(), status)
