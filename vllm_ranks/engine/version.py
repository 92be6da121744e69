"""What the embedded engine says it is, wherever a user looks: help, `/version`, log, `Server` header."""

from __future__ import annotations

EMULATED_VLLM_VERSION = "0.32.0"
VERSION = f"{EMULATED_VLLM_VERSION}+wavegate.embedded"
"""Version of vLLM whose external data-parallel mode this engine re-implements, and that it is not vLLM."""
SERVER_HEADER = "wavegate-embedded"
NOTICE = (
    "wavegate embedded engine: models the time of a vLLM rank and generates placeholder text, "
    "for development and evaluation. `vllm serve` is the production engine."
)
