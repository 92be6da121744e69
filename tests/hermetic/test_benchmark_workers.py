"""Runs side by side can be interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.builders_group import descendants, eventually

TRACE = [
    {
        "timestamp": 100 * n,
        "input_length": 9_000,
        "output_length": 400,
        "hash_ids": list(range(18 * n, 18 * n + 18)),
    }
    for n in range(3_000)
]


def test_an_interrupt_ends_a_comparison_and_all_its_processes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    command = [*(sys.executable, "-m", "gateway.cli", "bench", "quality"), "--trace", str(trace)]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        # What starts the tests may have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert eventually(lambda: len(descendants(process.pid)) > 0, limit_s=30)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
