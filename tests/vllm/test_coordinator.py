"""One list of demands on a DP coordinator, met by the embedded one and by vLLM's own.

The test plays the engines and the front ends, message by message (vLLM 0.32
vllm/v1/engine/coordinator.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.builders_vllm import PROGRAMS, answer_of, running, tell, vllm_python
from vllm_ranks.engine import wire
from vllm_ranks.engine.coordinator import CoordinatorAddresses, CoordinatorConfig

SILENCE_MS = 300
PATIENCE_MS = 15_000


class Peers:
    """Hand-made engines and one front end around a coordinator."""

    def __init__(self, addresses: CoordinatorAddresses, engines: int) -> None:
        self.context = zmq.Context()
        self.engines = [self._socket(zmq.XSUB, addresses.back_publish) for _ in range(engines)]
        self.outputs = self._socket(zmq.PUSH, addresses.back_output)
        """One socket for all engines: what they say arrives in the order of the test."""
        self.front = self._socket(zmq.XSUB, addresses.front_publish)
        self.addresses = addresses

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = PATIENCE_MS
        socket.connect(address)
        return socket

    def start(self) -> None:
        """Subscribe everybody and wait for READY."""
        self.front.send(wire.SUBSCRIBE)
        for engine in self.engines:
            engine.send(wire.SUBSCRIBE)
        for engine in self.engines:
            assert engine.recv() == wire.COORDINATOR_READY
        # The first heartbeat shows that the front end's subscription has arrived too.
        self.published()

    # What engines and front ends say.

    def first_request(self, target: int | bytes | None, wave: int) -> None:
        self.front.send(wire.encode(wire.FirstRequest(target, wave)))

    def engine_says(self, engine: int, **fields: Any) -> None:
        self.outputs.send(wire.encode(wire.EngineCoreOutputs(engine, timestamp=1.0, **fields)))

    def start_wave(self, engine: int, wave: int) -> None:
        self.engine_says(engine, start_wave=wave)

    def wave_complete(self, wave: int) -> None:
        self.engine_says(0, wave_complete=wave)

    def stats(self, engine: int, *, waiting: int, running: int, wave: int = 0, step: int = 0) -> None:
        stats = wire.SchedulerStats(
            num_waiting_reqs=waiting,
            num_running_reqs=running,
            kv_cache_usage=0.5,
            current_wave=wave,
            step_counter=step,
        )
        self.engine_says(engine, scheduler_stats=stats)

    # What they hear.

    def woken(self) -> list[wire.StartWave]:
        """The START_DP_WAVE that every engine hears."""
        heard = []
        for engine in self.engines:
            kind, payload = engine.recv_multipart()
            assert kind == wire.EngineRequestType.START_DP_WAVE
            heard.append(msgspec.msgpack.decode(payload, type=wire.StartWave))
        return heard

    def nobody_is_woken(self) -> bool:
        return not any(engine.poll(SILENCE_MS) for engine in self.engines)

    def published(self) -> wire.CoordinatorUpdate:
        """The next publication."""
        return msgspec.msgpack.decode(self.front.recv(), type=wire.CoordinatorUpdate)

    def published_wave(self) -> tuple[int, bool]:
        """Wave and state of the next publication that is about the wave alone."""
        while True:
            update = self.published()
            if update.counts is None:
                return update.current_wave, update.engines_running

    def published_counts(self) -> list[list[float]]:
        """Counts of the next publication that has some."""
        while True:
            update = self.published()
            if update.counts is not None:
                return update.counts

    def nothing_about_waves(self) -> bool:
        """Whether only counts are published for a while."""
        end_s = time.monotonic() + SILENCE_MS / 1000
        while (left_s := end_s - time.monotonic()) > 0:
            if self.front.poll(left_s * 1000) and self.published().counts is None:
                return False
        return True


Start = Callable[[int, bool, Path], AbstractContextManager[CoordinatorAddresses]]


@contextmanager
def embedded(engines: int, lock_step: bool, folder: Path) -> Iterator[CoordinatorAddresses]:
    config = CoordinatorConfig(
        engine_count=engines,
        lock_step=lock_step,
        host="127.0.0.1",
        front_local_only=False,
        back_local_only=False,
        ipc_directory=str(folder),
    )
    module = "vllm_ranks.engine.coordinator"
    command = [sys.executable, "-m", module, str(os.getpid()), msgspec.json.encode(config).decode()]
    with running(command) as process:
        assert process.stdout is not None
        yield msgspec.json.decode(process.stdout.readline(), type=CoordinatorAddresses)


@pytest.fixture(scope="module")
def vllm_coordinators() -> Iterator[Start]:
    """Starts vLLM's coordinators, all by one process that has imported vLLM."""
    with running([vllm_python(), str(PROGRAMS / "coordinator.py")]) as process:

        @contextmanager
        def start(engines: int, lock_step: bool, _folder: Path) -> Iterator[CoordinatorAddresses]:
            tell(process, {"engine_count": engines, "lock_step": lock_step})
            try:
                yield msgspec.convert(answer_of(process), CoordinatorAddresses)
            finally:
                tell(process, "the test is over")

        yield start


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """`with coordinator(engines=2) as peers:`"""
    start_coordinator: Start = (
        embedded if request.param == "embedded" else request.getfixturevalue("vllm_coordinators")
    )

    @contextmanager
    def start(*, engines: int = 2, lock_step: bool = True, subscribed: bool = True) -> Iterator[Peers]:
        with start_coordinator(engines, lock_step, tmp_path) as addresses:
            peers = Peers(addresses, engines)
            try:
                if subscribed:
                    peers.start()
                yield peers
            finally:
                peers.context.destroy(linger=0)

    return start


# --- Subscriptions --------------------------------------------------------------------------------------


def test_ready_is_sent_when_the_last_engine_has_subscribed(coordinator: Any) -> None:
    with coordinator(engines=3, subscribed=False) as peers:
        for engine in peers.engines[:2]:
            engine.send(wire.SUBSCRIBE)
        assert not peers.engines[0].poll(SILENCE_MS)
        peers.engines[2].send(wire.SUBSCRIBE)
        assert [engine.recv() for engine in peers.engines] == [wire.COORDINATOR_READY] * 3


def test_an_engine_that_subscribes_later_makes_everybody_hear_ready_again(coordinator: Any) -> None:
    with coordinator() as peers:
        late = peers._socket(zmq.XSUB, peers.addresses.back_publish)
        late.send(wire.SUBSCRIBE)
        assert [socket.recv() for socket in (late, *peers.engines)] == [wire.COORDINATOR_READY] * 3


def test_unsubscribing_is_ignored(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.front.send(wire.UNSUBSCRIBE)
        peers.front.send(wire.SUBSCRIBE)
        peers.first_request(None, 0)
        assert peers.woken() == [wire.StartWave(0, None)] * 2


# --- Waves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [1, wire.engine_identity(1), None], ids=["number", "identity", "nobody"])
def test_the_first_request_wakes_every_engine_and_names_its_target(
    coordinator: Any, target: int | bytes | None
) -> None:
    with coordinator() as peers:
        peers.first_request(target, 0)
        assert peers.woken() == [wire.StartWave(0, target)] * 2
        # Having asked is no evidence that the engines run: that is for them to say.
        assert peers.nothing_about_waves()
        peers.first_request(target, 0)
        assert peers.woken() == [wire.StartWave(0, target)] * 2


def test_while_the_engines_run_a_first_request_is_ignored(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.start_wave(0, 0)
        peers.woken()
        assert peers.published_wave() == (0, True)
        peers.first_request(1, 0)
        assert peers.nobody_is_woken()


def test_a_completed_wave_is_published_at_once(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.start_wave(0, 0)
        assert peers.published_wave() == (0, True)
        peers.wave_complete(0)
        assert peers.published_wave() == (1, False)


def test_a_first_request_of_an_older_wave_excludes_nobody(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.wave_complete(4)
        assert peers.published_wave() == (5, False)
        peers.first_request(1, 3)
        assert peers.woken() == [wire.StartWave(5, None)] * 2


def test_an_engine_that_starts_a_wave_wakes_the_others(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.start_wave(1, 0)
        assert peers.woken() == [wire.StartWave(0, 1)] * 2
        assert peers.published_wave() == (0, True)


def test_an_engine_may_be_ahead_of_the_coordinator(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.start_wave(1, 7)
        assert peers.woken() == [wire.StartWave(7, 1)] * 2
        assert peers.published_wave() == (7, True)
        # The completion of an earlier wave that comes late changes nothing.
        peers.wave_complete(6)
        assert peers.nothing_about_waves()
        peers.wave_complete(7)
        assert peers.published_wave() == (8, False)


def test_two_engines_racing_to_start_a_wave_start_it_once(coordinator: Any) -> None:
    with coordinator(engines=3) as peers:
        peers.wave_complete(0)
        assert peers.published_wave() == (1, False)
        peers.start_wave(1, 1)
        peers.start_wave(2, 1)
        (first, *_rest) = peers.woken()
        assert first.wave == 1
        assert first.exclude_engine in (1, 2)
        assert peers.published_wave() == (1, True)
        assert peers.nobody_is_woken()
        assert peers.nothing_about_waves()


def test_starting_a_wave_of_the_past_is_ignored(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.wave_complete(3)
        assert peers.published_wave() == (4, False)
        peers.start_wave(1, 2)
        assert peers.nobody_is_woken()


def test_completing_a_wave_of_the_past_is_ignored(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.wave_complete(3)
        assert peers.published_wave() == (4, False)
        peers.wave_complete(3)
        assert peers.nothing_about_waves()


def test_completion_wins_over_a_start_in_the_same_message(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.engine_says(0, wave_complete=0, start_wave=9)
        assert peers.published_wave() == (1, False)
        assert peers.nobody_is_woken()


def test_short_messages_are_understood(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.outputs.send(wire.encode([0, [], None, 1.0, None, None, 2]))
        assert peers.published_wave() == (3, False)


# --- Publications ---------------------------------------------------------------------------------------


def test_counts_come_as_a_heartbeat_even_when_nobody_reports(coordinator: Any) -> None:
    with coordinator() as peers:
        started_s = time.monotonic()
        update = peers.published()
        assert (update.counts, update.current_wave, update.engines_running) == ([[0, 0, 0.0]] * 2, 0, False)
        assert 3 < time.monotonic() - started_s < 10  # every 5 s


def test_reported_counts_are_published_by_global_rank(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.stats(0, waiting=1, running=2, step=1)
        peers.stats(1, waiting=3, running=4, step=1)
        assert peers.published_counts() == [[1, 2, 0.5], [3, 4, 0.5]]


def test_in_lock_step_a_new_step_publishes_the_whole_previous_one_first(coordinator: Any) -> None:
    with coordinator() as peers:
        peers.stats(0, waiting=1, running=1, step=1)
        peers.stats(1, waiting=1, running=1, step=1)
        peers.stats(0, waiting=9, running=9, step=2)
        assert peers.published_counts() == [[1, 1, 0.5], [1, 1, 0.5]]
        assert peers.published_counts() == [[9, 9, 0.5], [1, 1, 0.5]]


def test_dense_engines_have_no_waves(coordinator: Any) -> None:
    with coordinator(lock_step=False) as peers:
        peers.first_request(1, 0)
        peers.start_wave(0, 0)
        peers.wave_complete(0)
        assert peers.nobody_is_woken()
        peers.stats(1, waiting=3, running=4)
        update = peers.published()
        assert (update.counts, update.current_wave, update.engines_running) == (
            [[0, 0, 0.0], [3, 4, 0.5]],
            0,
            False,
        )
