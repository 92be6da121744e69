"""Faults on demand: what a rank can do to its users and its group, switchable while it runs.

`POST /fault_injection` exists only with `--enable-fault-injection`; `GET` tells what is in force. Each
fault is one that happens to real vLLM ranks. Must never be on by itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from vllm_ranks.engine.arguments import PeerDeathPolicy
from vllm_ranks.engine.client import EngineDeadError, UtilityError
from vllm_ranks.engine.front_end import FrontEnd
from vllm_ranks.engine.openai_requests import ApiError, read_body
from vllm_ranks.engine.processes import Child

PATH = "/fault_injection"
MAX_DELAY_S = 3_600.0


class EngineDeath(msgspec.Struct, frozen=True, tag="engine_death", tag_field="fault"):
    """The engine dies: of an exception, or of SIGKILL."""

    by: str = "exception"


class PeerDeath(msgspec.Struct, frozen=True, tag="peer_death", tag_field="fault"):
    """What the loss of another rank does to this one: `exit` (the engine dies too) or `hang`."""

    policy: PeerDeathPolicy


class CoordinatorDeath(msgspec.Struct, frozen=True, tag="coordinator_death", tag_field="fault"):
    """SIGKILL to the DP coordinator; only rank 0 has it."""


class Hang(msgspec.Struct, frozen=True, tag="hang", tag_field="fault"):
    """The engine stops stepping, and with it, in a wave, the whole group; /health stays 200."""

    on: bool = True


class Drain(msgspec.Struct, frozen=True, tag="drain", tag_field="fault"):
    """As after SIGTERM with a shutdown timeout: new requests get 200 and finish_reason "abort"."""

    on: bool = True


class Slowdown(msgspec.Struct, frozen=True, tag="slowdown", tag_field="fault"):
    """Steps last this many times as long."""

    factor: float


class Refuse(msgspec.Struct, frozen=True, tag="refuse", tag_field="fault"):
    """Generating requests are answered 503."""

    on: bool = True


class DelayHeaders(msgspec.Struct, frozen=True, tag="delay_headers", tag_field="fault"):
    """Generating requests wait this long before anything of the response is sent."""

    seconds: float


Fault = EngineDeath | PeerDeath | CoordinatorDeath | Hang | Drain | Slowdown | Refuse | DelayHeaders


class FaultInjection:
    """The faults of one API server and its engines."""

    def __init__(
        self, front_end: FrontEnd, engines: Callable[[], list[Child]], coordinator: Callable[[], Child | None]
    ) -> None:
        """Engine and coordinator processes this server started, for the faults that kill them."""
        self._front_end = front_end
        self._engines = engines
        self._coordinator = coordinator
        self._refusing = False
        self._delay_s = 0.0
        self._in_force: dict[str, Any] = {}

    async def before_answer(self) -> None:
        """Delay or refuse one generating request.

        Raises:
            ApiError: 503.
        """
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if self._refusing:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise ApiError("Refused by fault injection.", status=status, kind=status.phrase)

    async def show(self, http: web.Request) -> web.Response:
        """GET: what was switched last, by fault."""
        return web.json_response(self._in_force)

    async def switch(self, http: web.Request) -> web.Response:
        """POST one fault as JSON, e.g. `{"fault": "slowdown", "factor": 8}`."""
        fault: Fault = read_body(await http.read(), Fault)  # type: ignore[arg-type]
        try:
            await self._apply(fault)
        except (UtilityError, ValueError) as error:
            raise ApiError(str(error), param="fault") from None
        except EngineDeadError as error:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            raise ApiError(str(error), status=status, kind="InternalServerError") from None
        description: dict[str, Any] = msgspec.to_builtins(fault)
        self._in_force[description.pop("fault")] = description
        return web.json_response(self._in_force)

    async def _apply(self, fault: Fault) -> None:
        match fault:
            case EngineDeath(by="exception"):
                # Death may be faster than its confirmation.
                with suppress(EngineDeadError):
                    await self._in_engines("die")
            case EngineDeath(by="kill"):
                if not self._engines():
                    raise ValueError("with several API servers the launcher has the engines: use exception")
                _kill(self._engines())
            case EngineDeath():
                raise ValueError("engine_death is `by` exception or kill")
            case PeerDeath(policy):
                await self._in_engines("set_on_peer_death", policy)
            case CoordinatorDeath():
                coordinator = self._coordinator()
                if coordinator is None:
                    raise ValueError("this process has no DP coordinator: ask rank 0")
                _kill([coordinator])
            case Hang(on):
                await self._in_engines("set_hanging", on)
            case Drain(on):
                await self._in_engines("drain", on)
            case Slowdown(factor):
                await self._in_engines("set_slowdown", factor)
            case Refuse(on):
                self._refusing = on
            case DelayHeaders(seconds):
                if not 0 <= seconds <= MAX_DELAY_S:
                    raise ValueError(f"seconds must be in [0, {MAX_DELAY_S:g}]")
                self._delay_s = seconds

    async def _in_engines(self, method: str, *args: Any) -> None:
        client = self._front_end.client
        calls: list[Awaitable[Any]] = [client.call_utility(rank, method, *args) for rank in client.engines]
        await asyncio.gather(*calls)


def _kill(children: list[Child]) -> None:
    for child in children:
        child.send_signal(signal.SIGKILL)
