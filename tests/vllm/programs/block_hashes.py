"""Hashes prompts with vLLM's own request and block hasher."""

import json
import sys

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request


def main() -> None:
    init_none_hash(sha256_cbor)
    answers = []
    for prompt in json.loads(sys.stdin.readline()):
        lora = prompt["lora"]
        request = Request(
            request_id="r",
            prompt_token_ids=prompt["tokens"],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=None if lora is None else LoRARequest(lora[0], 1, lora[1]),
            cache_salt=prompt["cache_salt"],
            block_hasher=get_request_block_hasher(prompt["block_size"], sha256_cbor),
        )
        hashes = request.block_hashes
        answers.append([[bytes(h).hex(), maybe_convert_block_hash(h)] for h in hashes])
    print("ANSWER " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
