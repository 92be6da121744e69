"""Methods that front ends may call in an engine (UTILITY messages), and the faults they can switch on.

Faults exist only with `--enable-fault-injection`. Must never act by itself: the run loop looks at what
was switched, and does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_ranks.engine import wire
from vllm_ranks.engine.collective import Collective
from vllm_ranks.engine.core import EngineCore


class InjectedDeath(RuntimeError):
    """The engine was told to die, to see what everybody else makes of it."""


class EngineControls:
    """What is switched on in one engine."""

    def __init__(self, core: EngineCore, group: Collective | None, *, enable_fault_injection: bool) -> None:
        self.hanging = False
        """The engine does not step."""
        self.draining = False
        """New requests are answered "abort"."""
        self.dying = False
        self._core = core
        self._group = group
        self._methods: dict[str, Callable[..., Any]] = {
            "is_sleeping": lambda: False,
            "reset_prefix_cache": lambda *_options: core.scheduler.kv_cache.reset(),
        }
        if enable_fault_injection:
            self._methods |= {
                "set_slowdown": self._set_slowdown,
                "set_hanging": self._set_hanging,
                "set_on_peer_death": self._set_on_peer_death,
                "drain": self._set_draining,
                "die": self._die,
            }

    def call(self, call: wire.UtilityCall) -> wire.UtilityOutput:
        """Call a method; failures are part of the answer."""
        method = self._methods.get(call.method)
        if method is None:
            failure = f"Call to {call.method} method failed: no such method in the embedded engine"
            return wire.UtilityOutput(call.call_id, failure_message=failure)
        try:
            return wire.UtilityOutput(call.call_id, result=[None, method(*call.args)])
        except (TypeError, ValueError) as error:
            failure = f"Call to {call.method} method failed: {error}"
            return wire.UtilityOutput(call.call_id, failure_message=failure)

    def _set_slowdown(self, factor: float) -> None:
        self._core.time_model = replace(self._core.time_model, slowdown=factor)

    def _set_hanging(self, on: bool) -> None:
        self.hanging = on

    def _set_on_peer_death(self, policy: str) -> None:
        if policy not in ("exit", "hang"):
            raise ValueError(f"policy must be exit or hang, got {policy!r}")
        if self._group is not None:
            self._group.on_peer_death = "exit" if policy == "exit" else "hang"

    def _set_draining(self, on: bool) -> None:
        self.draining = on

    def _die(self) -> None:
        self.dying = True
