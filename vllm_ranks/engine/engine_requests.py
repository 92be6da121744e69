"""What one engine keeps of each request besides its schedule: tokens, their source, and whom to answer.

Turns an ADD message into the scheduler's `EngineRequest` (how many tokens, which block hashes) and gives
every later token its id. Must never schedule, and never talk to a socket.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from vllm_ranks.engine import wire
from vllm_ranks.engine.block_hash import block_extra_keys, hash_block, hash_prompt
from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.text import Prose


class EngineSideRequest:
    """One request inside the engine."""

    __slots__ = ("cache_salt", "client_index", "lora", "lora_id", "prose", "request", "session_id", "tokens")

    def __init__(
        self, message: wire.EngineCoreRequest, block_size: int, max_model_len: int, hash_blocks: bool
    ) -> None:
        """Raises ValueError for a message without prompt or sampling parameters."""
        if not message.prompt_token_ids or message.sampling_params is None:
            raise ValueError(f"{message.request_id}: only prompts of token ids with sampling parameters")
        parameters = message.sampling_params
        self.client_index = message.client_index
        self.tokens = array("Q", message.prompt_token_ids)
        """Prompt and, behind it, everything generated."""
        self.prose = Prose(message.prompt_token_ids, parameters.seed or 0)
        lora = message.lora_request
        self.lora = None if lora is None else (lora.lora_name, lora.lora_path)
        self.lora_id = None if lora is None else lora.lora_int_id
        self.cache_salt = message.cache_salt
        self.session_id = message.session_id
        limit = parameters.max_tokens if parameters.max_tokens is not None else max_model_len
        natural = max(self.prose.natural_length, parameters.min_tokens)
        ends_by_itself = not parameters.ignore_eos and natural <= limit
        self.request = EngineRequest(
            request_id=message.request_id,
            arrival_s=message.arrival_time,
            prompt_tokens=len(self.tokens),
            output_tokens=natural if ends_by_itself else limit,
            finish_reason=FinishReason.STOP if ends_by_itself else FinishReason.LENGTH,
            priority=message.priority,
            prompt_block_hashes=(
                hash_prompt(message.prompt_token_ids, block_size, lora=self.lora, cache_salt=self.cache_salt)
                if hash_blocks
                else ()
            ),
            lora_name=None if self.lora is None else self.lora[0],
        )

    def next_token(self) -> int:
        """Generate one token."""
        token = self.prose.next_token()
        self.tokens.append(token)
        return token


class EngineSideRequests:
    """All requests of one engine by id."""

    def __init__(self, block_size: int, max_model_len: int, hash_blocks: bool) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._hash_blocks = hash_blocks
        self._requests: dict[str, EngineSideRequest] = {}

    def add(self, message: wire.EngineCoreRequest) -> EngineSideRequest:
        """Remember a request; raises ValueError if it cannot be served."""
        if message.request_id in self._requests:
            raise ValueError(f"request id {message.request_id!r} is in use")
        request = EngineSideRequest(message, self._block_size, self._max_model_len, self._hash_blocks)
        self._requests[message.request_id] = request
        return request

    def __getitem__(self, request_id: str) -> EngineSideRequest:
        return self._requests[request_id]

    def pop(self, request_id: str) -> EngineSideRequest:
        """Forget a request that has ended."""
        return self._requests.pop(request_id)

    def discard(self, request_id: str) -> None:
        """Forget a request that the scheduler refused."""
        self._requests.pop(request_id, None)

    def ids(self) -> list[str]:
        """Every unfinished request."""
        return list(self._requests)

    def hash_generated_block(
        self, request: EngineRequest, block_index: int, parent_hash: Hashable | None
    ) -> Hashable:
        """The scheduler's block hasher: real hashes over real tokens, also of generated text."""
        kept = self._requests[request.request_id]
        tokens = self.block_tokens(kept, block_index, 1)
        extra_keys = block_extra_keys(block_index, lora=kept.lora, cache_salt=kept.cache_salt)
        if not (parent_hash is None or isinstance(parent_hash, bytes)):
            raise TypeError("block hashes of this engine are bytes")
        return hash_block(parent_hash, tokens, extra_keys)

    def block_tokens(self, request: EngineSideRequest, first_block: int, count: int) -> Sequence[int]:
        """Token ids of `count` blocks from `first_block` on."""
        start = first_block * self._block_size
        return request.tokens[start : start + count * self._block_size].tolist()
