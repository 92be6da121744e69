"""Processes that run simulations side by side, and end when they are interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


@contextmanager
def worker_processes() -> Iterator[ProcessPoolExecutor]:
    """One for each CPU. If the block is left by an exception, what has not begun is not begun any more."""
    # Ctrl-C goes to all of them: a worker that took it for an exception could keep a lock of their queue.
    context = get_context("forkserver")  # a fork of this process would be without its other threads
    with ProcessPoolExecutor(os.cpu_count(), context, _end_when_interrupted) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _end_when_interrupted() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
