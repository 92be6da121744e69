"""Requests to replay: readers for public traces, and generators for the shapes no trace has.

Traces are not part of the repository; each reader says where the public file comes from. Pure but for reading
the file it is given.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512
"""Tokens that one id of `blocks` stands for, in every trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    """Arrival, from the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """One id per full block of the prompt; equal leading ids are a shared prefix."""


class TraceError(ValueError):
    """The file is not such a trace; the message names the line and what is wrong."""


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: Path, seed: int = 0) -> Iterator[TraceRequest]:
    """Requests of a Mooncake trace (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0), JSON lines.

    Its time stamps are in buckets of 3 s; the requests of a bucket are spread evenly over it.
    """
    rng = random.Random(seed)
    decoder = msgspec.json.Decoder(_MooncakeRow)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}:{number}: {error}") from error
            full_blocks = row.input_length // BLOCK_TOKENS
            yield TraceRequest(
                at_s=row.timestamp / 1000 + 3 * rng.random(),
                prompt_tokens=max(1, row.input_length),
                output_tokens=max(1, row.output_length),
                blocks=tuple(row.hash_ids[:full_blocks]),
            )


def read_azure(path: Path, seed: int = 0) -> Iterator[TraceRequest]:
    """Requests of an Azure LLM inference trace (Azure/AzurePublicDataset, CC-BY 4.0), CSV.

    It has no prefix information: no two prompts share anything.
    """
    with path.open(newline="") as file:
        start: datetime | None = None
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                prompt_tokens, output_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: {error!r}") from error
            start = start or at
            yield TraceRequest((at - start).total_seconds(), max(1, prompt_tokens), max(1, output_tokens))


READERS: dict[str, Callable[[Path, int], Iterator[TraceRequest]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
}


def load(
    path: Path,
    trace_format: str,
    *,
    speed: float = 1.0,
    duration_s: float | None = None,
    skip_s: float = 0.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """A trace in order of arrival, `speed` times as fast, of which the first `duration_s` are kept.

    Args:
        skip_s: what is left out before that, by the trace's own clock.

    Raises:
        TraceError: the file is not in that format, or nothing of it is left.
    """
    requests = sorted(READERS[trace_format](path, seed), key=lambda request: request.at_s)
    scaled = [
        replace(request, at_s=(request.at_s - skip_s) / speed)
        for request in requests
        if request.at_s >= skip_s
    ]
    kept = [request for request in scaled if duration_s is None or request.at_s < duration_s]
    if not kept:
        played = f"in the first {duration_s:g} s at speed {speed:g}" if duration_s is not None else "left"
        raise TraceError(f"{path} has no request {played}" + (f" after {skip_s:g} s" if skip_s else ""))
    return kept


@dataclass(frozen=True, slots=True)
class Shape:
    """A distribution of requests to generate."""

    rate_per_s: float
    prompt_tokens: tuple[int, int]
    """Shortest and longest; drawn evenly on a logarithmic scale."""
    output_tokens: tuple[int, int]
    burst: int = 1
    """Requests that arrive at once."""


def generate(shape: Shape, duration_s: float, seed: int = 0) -> list[TraceRequest]:
    """Requests with exponential times between bursts; no two share a prefix."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    at_s = 0.0
    while True:
        at_s += rng.expovariate(shape.rate_per_s / shape.burst)
        if at_s >= duration_s:
            return requests
        requests += [
            TraceRequest(at_s, _draw(rng, shape.prompt_tokens), _draw(rng, shape.output_tokens))
            for _ in range(shape.burst)
        ]


def _draw(rng: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    tokens: float = low * (high / low) ** rng.random()
    return round(tokens)
