"""A unit: child processes that start together, are ready together and are stopped together.

A group of ranks is a unit, because one lost rank breaks the others; gateway and Envoy are units of one.
Must never decide when to restart: that is the supervisor's matter.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import aiohttp

from gateway.log_file import LogFile
from gateway.plan import ProcessPlan, UnitPlan
from gateway.run_folder import RunFolder
from vllm_ranks.engine.processes import describe_exit
from vllm_ranks.launcher.rank_log import ERRORS_BELONG_TOGETHER_S, RankLog, Trouble

READY_POLL_S = 0.1
READY_ANSWER_TIMEOUT_S = 2.0
SHOWN_LOG_LINES = 5
KILL_WAIT_S = 5.0

OnReady = Callable[[int], None]
"""Told how many processes of the unit are ready."""


class UnitFailed(Exception):
    """A unit did not start, or lost a process; the message has the last log lines and where the log is."""


class _Output(asyncio.Protocol):
    """Copies what a process and its offspring write to its log."""

    def __init__(self, log: LogFile, rank_log: RankLog | None) -> None:
        self._log = log
        self._rank_log = rank_log
        self._transport: asyncio.BaseTransport | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._log.write(data)
        if self._rank_log is not None:
            self._rank_log.feed(data, asyncio.get_running_loop().time())

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()

    def close(self) -> None:
        """Read no more."""
        if self._transport is not None:
            self._transport.close()


class ChildProcess:
    """One running process; its output goes to its log. It dies with this one, whatever happens."""

    def __init__(
        self,
        plan: ProcessPlan,
        process: asyncio.subprocess.Process,
        log: LogFile,
        output: _Output,
        rank_log: RankLog | None,
    ) -> None:
        self.plan = plan
        self.is_ready = False
        self.rank_log = rank_log
        """What its log tells; `None` if it is no vLLM server."""
        self._process = process
        self._log = log
        self._output = output
        self.exited = asyncio.create_task(self._wait())
        """Done when the process has ended; its result is when, on the event loop's clock."""

    @classmethod
    async def start(cls, plan: ProcessPlan, log: LogFile) -> ChildProcess:
        """Start it in a session of its own: a terminal's Ctrl-C reaches only the supervisor."""
        wrapper = (sys.executable, "-P", "-m", "vllm_ranks.engine.processes", str(os.getpid()), "--")
        # A pipe of our own: asyncio's would keep `wait` from returning while offspring holds it open.
        read_end, write_end = os.pipe()
        rank_log = RankLog(asyncio.get_running_loop().time()) if plan.is_vllm else None
        output = _Output(log, rank_log)
        try:
            await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(read_end, "rb"))
            process = await asyncio.create_subprocess_exec(
                *wrapper,
                *plan.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **plan.environment},
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        return cls(plan, process, log, output, rank_log)

    async def _wait(self) -> float:
        await self._process.wait()
        return asyncio.get_running_loop().time()

    @property
    def session(self) -> int:
        """The session of the process and of what it starts."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Signal the process, unless it has ended."""
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass  # ended just now

    def kill_session(self) -> None:
        """SIGKILL the process and whatever it has started and left behind."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nobody is left in its session

    async def close(self) -> None:
        """Kill what is left of the process and what it started, and wait for its last output."""
        self.kill_session()
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await self.exited
                await self._output.ended.wait()
        except TimeoutError:
            pass  # stuck in the kernel, or offspring in a session of its own: nothing more can be done
        self._output.close()
        self._log.close()

    @property
    def failed_at_s(self) -> tuple[bool, float]:
        """Sorts processes by who failed first; those that only felt another's failure come last."""
        ended_s = self.exited.result() if self.exited.done() else float("inf")
        trouble = self._trouble()
        if trouble is None:
            return not self.exited.done(), ended_s
        return trouble.is_a_consequence, min(trouble.began_at_s, ended_s)

    def _trouble(self) -> Trouble | None:
        """What its log tells of a failure under way; `None` if nothing, or only of a survived one."""
        trouble = self.rank_log.trouble if self.rank_log is not None else None
        now_s = asyncio.get_running_loop().time()
        if trouble is None or now_s - trouble.last_at_s > ERRORS_BELONG_TOGETHER_S:
            return None
        return trouble

    def account(self) -> str:
        """How it ended, and its last words: the first ones of its trouble, if it is known to tell any."""
        code = self._process.returncode
        happened = "is still running" if code is None else f"ended with {describe_exit(code)}"
        trouble = self._trouble()
        lines = trouble.lines if trouble is not None else self._log.last_lines(SHOWN_LOG_LINES)
        words = [f"{self.plan.name} {happened}; log: {self._log.path}", *(f"  | {line}" for line in lines)]
        return "\n".join(words)


class Unit:
    """Starts, watches and stops the processes of one plan; can be started again after `stop`."""

    def __init__(self, plan: UnitPlan, folder: RunFolder) -> None:
        self.plan = plan
        self._folder = folder
        self._children: list[ChildProcess] = []

    @property
    def is_started(self) -> bool:
        """Whether processes may be running."""
        return bool(self._children)

    async def start(self, on_ready: OnReady = lambda _count: None) -> None:
        """Start all processes and return when all are ready.

        Raises:
            UnitFailed: one ended or was not ready in time. The others are still running: call `stop`.
        """
        for plan in self.plan.processes:
            await self._start_child(plan)
        ready = asyncio.create_task(self._wait_until_ready(on_ready))
        loss = asyncio.create_task(self.wait_for_loss())
        try:
            await asyncio.wait(
                {ready, loss}, timeout=self.plan.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if loss.done():
                raise loss.result()
            if not ready.done():
                waiting = next(child for child in self._children if not child.is_ready)
                url, limit_s = waiting.plan.ready_url, self.plan.ready_timeout_s
                raise UnitFailed(f"no answer from {url} within {limit_s:g} s: {waiting.account()}")
            ready.result()
        finally:
            ready.cancel()
            loss.cancel()

    async def _start_child(self, plan: ProcessPlan) -> None:
        """Not cancelled half-way: a process that has been started must be known to be stopped."""
        log = LogFile(self._folder.log_path(plan.name), told_elsewhere=plan.access_log_prefix)
        starting = asyncio.create_task(ChildProcess.start(plan, log))
        try:
            await asyncio.shield(starting)
        finally:
            self._children.append(await starting)

    async def _wait_until_ready(self, on_ready: OnReady) -> None:
        waiting = list(self._children)
        timeout = aiohttp.ClientTimeout(total=READY_ANSWER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while waiting:
                for child in list(waiting):
                    if await _answers(session, child.plan.ready_url):
                        child.is_ready = True
                        waiting.remove(child)
                        on_ready(len(self._children) - len(waiting))
                await asyncio.sleep(READY_POLL_S if waiting else 0)

    @property
    def rank_logs(self) -> dict[str, RankLog]:
        """What the logs of its vLLM servers tell, by name of the process."""
        return {child.plan.name: child.rank_log for child in self._children if child.rank_log is not None}

    @property
    def sessions(self) -> dict[str, int]:
        """The sessions of its processes, by their names."""
        return {child.plan.name: child.session for child in self._children}

    async def settle(self, limit_s: float) -> None:
        """Give the others time to show what the loss of one does to them."""
        if exits := [child.exited for child in self._children]:
            await asyncio.wait(exits, timeout=limit_s)

    def account(self) -> str:
        """The account of the process that failed first."""
        return min(self._children, key=lambda child: child.failed_at_s).account()

    async def wait_for_loss(self) -> UnitFailed:
        """Return when the first process has ended, with its account."""
        exits = {child.exited: child for child in self._children}
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        lost = exits[min(done, key=lambda exited: exited.result())]
        await lost.close()
        return UnitFailed(lost.account())

    async def stop(self, timeout_s: float | None = None) -> None:
        """SIGTERM all, SIGKILL what is left after the plan's time, or this one; nothing runs afterwards."""
        for child in self._children:
            child.signal(signal.SIGTERM)
        if exits := [child.exited for child in self._children]:
            limit_s = self.plan.stop_timeout_s if timeout_s is None else timeout_s
            await asyncio.wait(exits, timeout=limit_s)
        await asyncio.gather(*(child.close() for child in self._children))
        self._children.clear()

    def kill(self) -> None:
        """SIGKILL everything at once; `stop` has still to be awaited."""
        for child in self._children:
            child.kill_session()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
