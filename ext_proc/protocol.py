"""What all body modes share: their settings, the memory they may take, and what a mode is to its exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from ext_proc.decision import Refused
from ext_proc.facts import Tokenise
from ext_proc.request_head import DEFAULT_NAMES, HeadNames, RequestHead
from ext_proc.vocabulary import RequestFacts


@dataclass(frozen=True, slots=True)
class ProtocolSettings:
    """What a configuration can say about the protocol."""

    max_body_bytes: int = 16 << 20
    """Largest request body; larger ones are refused with 413."""
    max_collected_bytes: int = 1 << 30
    """Bodies collected from streams and not yet passed on, over all streams."""
    pass_malformed_bodies: bool = False
    """Let the ranks answer bodies that no rank can serve, instead of refusing them with 400."""
    model_names: Mapping[str, str] = field(default_factory=dict)
    """Name that clients use for a model → name that the ranks know."""
    head_names: HeadNames = DEFAULT_NAMES
    """Headers whose names the configuration chooses."""
    tokenise: Tokenise | None = None
    """Makes tokens of prompts; without it, they are known as text."""
    conformance_tests: bool = False
    """Obey the headers of the endpoint-picker conformance tests. Lets any client choose its rank."""


class CollectedBodies:
    """The memory that bodies of all streams take together."""

    __slots__ = ("_max_bytes", "bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes = 0

    def has_room(self, more_bytes: int) -> bool:
        """Whether so many more bytes may be kept."""
        return self.bytes + more_bytes <= self._max_bytes


Step = RequestFacts | Refused | Iterable[bytes]
"""What a message of the request leads to: a question to the decider, a refusal, or serialised replies."""


class RequestSide(Protocol):
    """The request phases of one stream in one body mode: messages in, steps out."""

    def on_message(self, kind: str, message: ProcessingRequest) -> Step:
        """Take in a message whose field `kind` is set, e.g. "request_body"."""
        ...

    def on_placed(self, endpoints: tuple[str, ...]) -> Iterable[bytes]:
        """The replies that send the request to the first of `endpoints`, the rest for retries.

        Called once, after `on_message` returned facts.
        """
        ...

    @property
    def head(self) -> RequestHead:
        """What is known of the request before its body."""
        ...

    def renamed(self) -> tuple[str, str] | None:
        """The model's name to the ranks and to the client, if they differ."""
        ...

    def discard(self) -> None:
        """Give back the memory that the request's body takes. May be called again."""
        ...
