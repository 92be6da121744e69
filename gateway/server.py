"""The gateway process: builds the object graph from a configuration, serves until told to stop, drains.

The only place where the decision, the scraper, the ext_proc server and the admin API meet.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time

from aiohttp import web

from ext_proc.cache_events import CacheEvent
from ext_proc.facts import Tokenise
from ext_proc.ledger import Ledger
from ext_proc.protocol import ProtocolSettings
from ext_proc.service import ExtProcServer, ServerSettings, TlsFiles
from ext_proc.vocabulary import Rank, RankReport
from gateway.access_entries import access_entries_handler
from gateway.admin import admin_app
from gateway.admin_explain import explain_routes
from gateway.admin_groups import group_routes
from gateway.admin_token import asks_for, read_token
from gateway.config import Config, SupervisionSection
from gateway.config_gateway import GatewaySection
from gateway.config_types import endpoint
from gateway.decision import LiveAdmission, build_admission, build_ledger
from gateway.decision_log import DecisionLog
from gateway.group_monitor import GroupMonitor, MonitoredGroup, MonitorSettings
from gateway.prompt_tokenizer import tokenise_of
from gateway.rotation import Rotation
from gateway.telemetry import Telemetry
from vllm_ranks.reports.kv_subscriber import follow_all
from vllm_ranks.reports.scraper import Scraper

log = logging.getLogger(__name__)


class _LedgerFeed:
    """Passes what the scraper hears to the ledger, the monitor and the metrics."""

    def __init__(self, ledger: Ledger, monitor: GroupMonitor, telemetry: Telemetry) -> None:
        self._monitor = monitor
        self._ledger = ledger
        self._telemetry = telemetry

    def on_report(self, rank: Rank, report: RankReport) -> None:
        self._ledger.record_report(rank, report)
        self._monitor.on_report(rank, report)
        self._telemetry.on_scrape(rank, succeeded=True)

    def on_failed_scrape(self, rank: Rank, _cause: str, *, refused: bool) -> None:
        self._ledger.record_failed_scrape(rank)
        if refused:
            self._monitor.on_refusal(rank)
        self._telemetry.on_scrape(rank, succeeded=False)


class _CacheFeed:
    """Passes on what ranks that publish KV cache events say of their caches."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_cache_unknown(self, rank: Rank, *, all_to_come: bool) -> None:
        self._ledger.forget_cache_events(rank, all_to_come=all_to_come)

    def on_cache_events(self, rank: Rank, events: list[CacheEvent]) -> None:
        self._ledger.record_cache_events(rank, events)


class _EnvoyFeed:
    """Passes on what Envoy says of single requests."""

    def __init__(self, ledger: Ledger, monitor: GroupMonitor) -> None:
        self._ledger = ledger
        self._monitor = monitor

    def on_failed_answer(self, endpoint: str, status: int) -> None:
        self._monitor.on_failed_answer(endpoint, status)

    def on_retry(self, request_id: str, endpoint: str) -> None:
        self._ledger.note_retry(request_id, endpoint, time.monotonic())


class GatewayServer:
    """One gateway, from start to stop, in whatever event loop runs it."""

    def __init__(self, config: Config) -> None:
        """Build the gateway of a validated configuration; nothing listens yet.

        Raises:
            TokenizerError: a group's tokenizer cannot be used.
            AdminTokenError: the admin API's secret cannot be read.
        """
        settings = config.gateway
        self._config = config
        self._guards = asks_for(read_token(settings.admin_token_file))
        self._tokenise = tokenise_of(config)
        self.ledger = build_ledger(config)
        self._admission = build_admission(config, self.ledger)
        self._telemetry = Telemetry(self.ledger, self._admission)
        decider = LiveAdmission(self._admission)
        self._ext_proc = ExtProcServer(
            decider,
            _server_settings(settings),
            _protocol_settings(config, self._tokenise),
            DecisionLog(self._telemetry) if settings.log_decisions else self._telemetry,
        )
        decider.wake = self._ext_proc.wake

        self._rotation = Rotation((group.name for group in config.groups), self.ledger.set_rotation)
        self._monitor = GroupMonitor(
            (MonitoredGroup(group.name, group.model, group.ranks()) for group in config.groups),
            self.ledger,
            self._rotation,
            _monitor_settings(config.supervision),
        )
        self._ext_proc.serve_also(access_entries_handler(_EnvoyFeed(self.ledger, self._monitor)))
        self._scraper = Scraper(
            config.ranks(),
            _LedgerFeed(self.ledger, self._monitor, self._telemetry),
            interval_s=settings.reports.interval_s,
            jitter_ratio=settings.reports.jitter_ratio,
            timeout_s=settings.reports.timeout_s,
        )
        self._is_ready = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            OSError: an address is taken; the message names it.
        """
        settings = self._config.gateway
        admin = web.AppRunner(
            admin_app(
                self._config,
                self.ledger,
                self._admission,
                self._telemetry,
                lambda: self._is_ready,
                [
                    *group_routes(self.ledger, self._rotation, self._monitor),
                    *explain_routes(
                        self.ledger,
                        self._admission,
                        settings.head_names,
                        self._config.envoy.max_body_bytes,
                        self._tokenise,
                    ),
                ],
                self._guards,
            ),
            access_log=None,
        )
        await admin.setup()
        try:
            await web.TCPSite(admin, settings.admin_host, settings.admin_port).start()
            await self._ext_proc.start()
            log.info(
                "ext_proc on %s, admin on %s",
                settings.ext_proc_listen,
                endpoint(settings.admin_host, settings.admin_port),
            )
            async with asyncio.TaskGroup() as tasks:
                scraping = tasks.create_task(self._scraper.run())
                monitoring = tasks.create_task(self._monitor.run())
                following = tasks.create_task(follow_all(self._config.ranks(), _CacheFeed(self.ledger)))
                announcing = tasks.create_task(self._announce_when_scraped())
                await stop.wait()
                announcing.cancel()
                await self._drain()
                monitoring.cancel()
                following.cancel()
                scraping.cancel()
        finally:
            await self._ext_proc.stop()
            await admin.cleanup()

    async def _announce_when_scraped(self) -> None:
        await self._scraper.wait_first_round()
        await self._set_ready(True)
        log.info("ready")

    async def _drain(self) -> None:
        await self._set_ready(False)
        cut = await self._ext_proc.drain(self._config.gateway.drain_timeout_s)
        if cut:
            log.warning("%d requests were still under way at the drain timeout", cut)
        log.info("drained")

    async def _set_ready(self, ready: bool) -> None:
        self._is_ready = ready
        await self._ext_proc.set_ready(ready)


def _server_settings(settings: GatewaySection) -> ServerSettings:
    tls = settings.ext_proc_tls
    return ServerSettings(
        listen=settings.ext_proc_listen,
        max_streams=settings.max_streams,
        tls=TlsFiles(tls.cert, tls.key, tls.client_ca) if tls is not None else None,
    )


def _protocol_settings(config: Config, tokenise: Tokenise | None) -> ProtocolSettings:
    picker = config.gateway.endpoint_picker
    return ProtocolSettings(
        max_body_bytes=config.envoy.max_body_bytes,
        max_collected_bytes=picker.max_collected_bytes,
        pass_malformed_bodies=picker.pass_malformed_bodies,
        model_names=picker.model_names,
        head_names=config.gateway.head_names,
        tokenise=tokenise,
        conformance_tests=picker.conformance_tests,
    )


def _monitor_settings(supervision: SupervisionSection) -> MonitorSettings:
    return MonitorSettings(
        health_interval_s=supervision.health_interval_s,
        health_timeout_s=supervision.health_timeout_s,
        hang_after_s=supervision.hang_after_s,
        warm_up_timeout_s=supervision.warm_up_timeout_s,
    )


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await GatewayServer(config).serve(stop)
