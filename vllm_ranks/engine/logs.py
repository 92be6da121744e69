"""Log lines of the engine's processes: which process speaks, in vLLM's manner, on standard error."""

from __future__ import annotations

import logging
import os
import sys


def configure_logging(process_name: str, level: int = logging.INFO) -> None:
    """Log to standard error as `(EngineCore_DP0 pid=123) INFO 12:00:00 message`."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"({process_name} pid={os.getpid()}) %(levelname)s %(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
