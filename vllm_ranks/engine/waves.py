"""The wave protocol: who wakes a lock-step group, who puts it to sleep, and how everybody learns of it.

Three pure state machines, one per kind of participant (vLLM 0.32 vllm/v1/engine/coordinator.py,
vllm/v1/engine/core.py class DPEngineCoreProc, vllm/v1/engine/core_client.py class DPAsyncMPClient):

    front end ──FirstRequest──▶ coordinator ──StartDpWave──▶ engines
    engines ──WaveStarted / WaveComplete──▶ coordinator ──WavePublication──▶ front ends

Messages go in as arguments and come out as values; whoever owns the sockets (or the virtual clock)
carries them. Must never do I/O, sleep or read a clock.

vLLM's pause protocol (`/pause`, sleep mode) is not part of this engine: nothing can pause a rank, so
an engine never reaches the pause consensus after which vLLM's ignores StartDpWave.
"""

from __future__ import annotations

from dataclasses import dataclass

RankIdentity = int | bytes | None
"""How a StartDpWave names the engine that needs no waking. vLLM compares it with the rank's number, but
front ends name their target by its two-byte socket identity, so only a number ever excludes anybody."""


# --- Messages -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """Front end → coordinator: a request went to `target` while the group was asleep."""

    target: RankIdentity
    wave: int
    """The wave the front end believed to be current."""


@dataclass(frozen=True, slots=True)
class StartDpWave:
    """Coordinator → every engine: wake up for `wave`."""

    wave: int
    exclude: RankIdentity
    """The engine that is awake already."""


@dataclass(frozen=True, slots=True)
class WaveStarted:
    """Engine → coordinator (`start_wave`): this group is awake in `wave`."""

    wave: int


@dataclass(frozen=True, slots=True)
class WaveComplete:
    """Rank 0 → coordinator (`wave_complete`): the group agreed that `wave` has no work left."""

    wave: int


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """One engine's queues, as front ends of the internal mode balance on them."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Engine → coordinator: its queues at one lock-step; sent in internal and hybrid mode only."""

    counts: EngineCounts
    wave: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class WavePublication:
    """Coordinator → every front end."""

    counts: tuple[EngineCounts, ...] | None
    """By global rank; `None` when only the wave or its state changed."""
    wave: int
    running: bool


@dataclass(frozen=True, slots=True)
class CoordinatorReady:
    """Coordinator → every engine (`READY`): all engines have subscribed."""


@dataclass(frozen=True, slots=True)
class StatsOutOfOrder:
    """Not a message: the coordinator has something for its log."""

    engine_index: int
    wave: int
    step: int
    newest_wave: int
    newest_step: int


EngineMessage = WaveStarted | WaveComplete
CoordinatorMessage = StartDpWave | WavePublication | CoordinatorReady | StatsOutOfOrder


# --- Engine ---------------------------------------------------------------------------------------------


class WaveState:
    """One engine's part: it steps while `running`, and all engines stop at the same step.

    One iteration of the run loop is: inputs (`on_add`, `on_start_dp_wave`), the step, then `step_done`;
    when that says an agreement is due, every rank's unfinished work is combined and given to `agree`.
    """

    __slots__ = (
        "_messages",
        "_was_running",
        "current_wave",
        "dp_sync_interval",
        "rank",
        "running",
        "step_counter",
    )

    def __init__(self, rank: int, dp_sync_interval: int = 16) -> None:
        """`dp_sync_interval`: steps between two agreements; it must be the same on every rank."""
        if dp_sync_interval < 1:
            raise ValueError(f"dp_sync_interval must be at least 1, got {dp_sync_interval}")
        self.rank = rank
        self.dp_sync_interval = dp_sync_interval
        self.current_wave = 0
        self.running = False
        """vLLM's `engines_running`: this rank steps even without work of its own."""
        self.step_counter = 0
        """Steps of this wave; the same on every rank, because they step together."""
        self._was_running = False
        self._messages: list[EngineMessage] = []

    def on_add(self, request_wave: int) -> None:
        """A request arrived that its front end tagged with the wave it believed to be current."""
        if request_wave > self.current_wave:
            self.current_wave = request_wave
        elif request_wave < self.current_wave and not self.running:
            # The front end thought that wave was still running, so it told nobody to wake the others.
            self.running = True
            self._messages.append(WaveStarted(self.current_wave))

    def on_start_dp_wave(self, wave: int, exclude: RankIdentity) -> None:
        """The coordinator wakes the group; waves of the past are ignored."""
        if exclude != self.rank and wave >= self.current_wave:
            self.current_wave = wave
            self.running = True

    def step_done(self) -> bool:
        """Count a real or dummy step. True: an agreement is due, call `agree` before anything else."""
        self.step_counter += 1
        # Step 1 too, so that a wake-up for nothing costs one dummy batch instead of a whole interval.
        if self.step_counter == 1 or self.step_counter % self.dp_sync_interval == 0:
            return True
        self._conclude(True)
        return False

    def agree(self, any_rank_unfinished: bool) -> None:
        """The group's combined answer to "is there unfinished work?"."""
        self._conclude(any_rank_unfinished)

    def _conclude(self, running: bool) -> None:
        self.running = running
        if not running:
            if self.rank == 0:
                self._messages.append(WaveComplete(self.current_wave))
            self.current_wave += 1
            self.step_counter = 0
        elif not self._was_running and self.rank == 0:
            # The coordinator believes what engines did, not what it asked them to do.
            self._messages.append(WaveStarted(self.current_wave))
        self._was_running = running

    def take_messages(self) -> list[EngineMessage]:
        """Messages for the coordinator since the last call, in order."""
        messages = self._messages
        if messages:
            self._messages = []
        return messages


# --- Front end ------------------------------------------------------------------------------------------


class FrontEndWaves:
    """What a front end believes about its group: it tags requests and tells of the first one."""

    __slots__ = ("current_wave", "engines_running")

    def __init__(self) -> None:
        self.current_wave = 0
        self.engines_running = False

    def on_publication(self, publication: WavePublication) -> None:
        """The coordinator's word overrides what this front end assumed."""
        self.current_wave = publication.wave
        self.engines_running = publication.running

    def on_request(self, target: RankIdentity) -> FirstRequest | None:
        """A request is sent to engine `target`, tagged `current_wave`. What the coordinator must be told."""
        if self.engines_running:
            return None
        self.engines_running = True
        return FirstRequest(target, self.current_wave)


# --- Coordinator ----------------------------------------------------------------------------------------


class CoordinatorState:
    """The process beside rank 0: wakes all engines for one engine's request, and publishes.

    Publications of queue counts come from `on_time`: `next_publication_s` says when it wants the clock.
    In external mode engines send no stats, so those publications carry zeros (they do in vLLM too).
    """

    STATS_INTERVAL_S = 0.1
    """Changed counts are published at most this often."""
    QUIET_S = 0.05
    """In lock step, silence that shows that every engine's stats of one step have arrived."""
    HEARTBEAT_S = 5.0

    def __init__(self, engine_count: int, lock_step: bool = True) -> None:
        """`lock_step`: a MoE model. A dense one has no waves; its coordinator only publishes counts."""
        self.engine_count = engine_count
        self.lock_step = lock_step
        self.current_wave = 0
        self.engines_running = False
        """Observed from the engines' own messages, never predicted."""
        self._subscribed = 0
        self._counts = [EngineCounts()] * engine_count
        self._counts_changed = False
        self._previous_step_counts: tuple[EngineCounts, ...] | None = None
        self._newest_stats = (-1, -1)
        self._last_publication_s = float("-inf")
        self._last_event_s = float("-inf")

    def on_subscription(self, now_s: float) -> list[CoordinatorMessage]:
        """An engine subscribed. READY goes out with the last of them, and again for every later one."""
        self._last_event_s = now_s
        self._subscribed += 1
        return [CoordinatorReady()] if self._subscribed >= self.engine_count else []

    def on_first_request(self, request: FirstRequest, now_s: float) -> list[CoordinatorMessage]:
        """A front end sent a request to an engine of a sleeping group."""
        self._last_event_s = now_s
        if not self.lock_step or self.engines_running:
            return []
        # An engine that got a request of an older wave is not known to be awake in this one.
        exclude = None if request.wave < self.current_wave else request.target
        return [StartDpWave(self.current_wave, exclude)]

    def on_engine_outputs(
        self,
        engine_index: int,
        now_s: float,
        *,
        stats: EngineStats | None = None,
        wave_complete: int | None = None,
        start_wave: int | None = None,
    ) -> list[CoordinatorMessage]:
        """One message of an engine: stats first, then `wave_complete` or, only without it, `start_wave`."""
        self._last_event_s = now_s
        messages: list[CoordinatorMessage] = []
        if stats is not None and engine_index < self.engine_count:
            messages += self._record_stats(engine_index, stats)
        if not self.lock_step:
            return messages
        if wave_complete is not None:
            if self.current_wave <= wave_complete:
                self.current_wave = wave_complete + 1
                self.engines_running = False
                messages.append(self._wave_publication())
        elif start_wave is not None and (
            start_wave > self.current_wave or (start_wave == self.current_wave and not self.engines_running)
        ):
            self.current_wave = start_wave
            self.engines_running = True
            messages.append(StartDpWave(start_wave, engine_index))
            messages.append(self._wave_publication())
        return messages

    def next_publication_s(self) -> float:
        """When `on_time` has something to publish, unless another event comes first."""
        if self._subscribed < self.engine_count:
            return float("inf")
        quiet_s = self.QUIET_S if self.lock_step and self._previous_step_counts is None else 0.0
        interval_s = self.STATS_INTERVAL_S if self._counts_changed else self.HEARTBEAT_S
        return max(self._last_event_s + quiet_s, self._last_publication_s + interval_s)

    def on_time(self, now_s: float) -> list[CoordinatorMessage]:
        """The clock reached `now_s` without an event: publish counts if it is time."""
        if now_s < self.next_publication_s():
            return []
        if self._previous_step_counts is not None:
            counts = self._previous_step_counts
            self._previous_step_counts = None
        else:
            counts = tuple(self._counts)
            self._counts_changed = False
        self._last_publication_s = self._last_event_s = now_s
        return [WavePublication(counts, self.current_wave, self.engines_running)]

    def _record_stats(self, engine_index: int, stats: EngineStats) -> list[CoordinatorMessage]:
        notes: list[CoordinatorMessage] = []
        if self.lock_step:
            position = (stats.wave, stats.step)
            if position > self._newest_stats:
                # The first word of a new step: what was gathered until now is the whole previous step.
                if self._counts_changed:
                    self._previous_step_counts = tuple(self._counts)
                self._newest_stats = position
            elif position != self._newest_stats:
                notes.append(StatsOutOfOrder(engine_index, *position, *self._newest_stats))
        self._counts[engine_index] = stats.counts
        self._counts_changed = True
        return notes

    def _wave_publication(self) -> WavePublication:
        return WavePublication(None, self.current_wave, self.engines_running)
