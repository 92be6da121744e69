"""The vLLM side of these tests: programs run by the python of a separate environment that has vLLM.

Its path is in WAVEGATE_VLLM_PYTHON, by default `.venv-vllm/bin/python`; without it the tests that need it
are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
VLLM_PYTHON = Path(os.environ.get("WAVEGATE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
ANSWER = "ANSWER "
"""What a program prints before its JSON answer: vLLM itself prints whatever it likes."""

VllmProgram = Callable[..., Any]


def vllm_python() -> Path:
    """The interpreter; skips the test if there is none."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"no vLLM environment at {VLLM_PYTHON} (make vllm-env, or set WAVEGATE_VLLM_PYTHON)")
    return VLLM_PYTHON


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes, ended in any case."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment()
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def answer_of(process: subprocess.Popen[str]) -> Any:
    """The next answer a program prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise AssertionError(f"the program ended without an answer, exit code {process.wait()}")


@pytest.fixture(scope="session")
def run_in_vllm() -> VllmProgram:
    """`run_in_vllm("program", question)`: what tests/vllm/programs/program.py answers to a JSON question."""

    def run(program: str, question: Any) -> Any:
        with running([str(vllm_python()), str(PROGRAMS / f"{program}.py")]) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return answer_of(process)

    return run


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT) if sys.flags.isolated else "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
