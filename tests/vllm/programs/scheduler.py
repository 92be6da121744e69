"""Plays scripts on vLLM's own scheduler and tells what every step scheduled and left behind."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 1_000_000,
    "max_position_embeddings": 4_096,
    "hidden_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "torch_dtype": "float32",
}


class Player:
    """One scheduler and what has happened to it."""

    def __init__(self, case, folder):
        limits = case["limits"]
        self.block_size = case["block_size"]
        scheduler_config = SchedulerConfig(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_model_len=limits["max_model_len"],
            long_prefill_token_threshold=limits["long_prefill_token_threshold"],
            enable_chunked_prefill=limits["enable_chunked_prefill"],
            policy=case["policy"],
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        cache_config = CacheConfig(block_size=self.block_size, enable_prefix_caching=case["caching"])
        model_config = ModelConfig(
            model=folder, max_model_len=limits["max_model_len"], skip_tokenizer_init=True, dtype="float32"
        )
        config = VllmConfig(
            model_config=model_config,
            scheduler_config=scheduler_config,
            cache_config=cache_config,
            device_config=DeviceConfig("cpu"),
            lora_config=None if limits["max_loras"] is None else LoRAConfig(max_loras=limits["max_loras"]),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        config.cache_config.num_gpu_blocks = case["num_blocks"] + 1
        spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(
            num_blocks=case["num_blocks"] + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.block_size,
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(self.block_size, sha256_cbor)
        self.output = None
        self.numbers = {}
        self.generated = {}
        self.queries = self.hits = 0

    def add(self, request_id, tokens, output, priority, arrival_s, lora):
        self.numbers[request_id] = len(self.numbers) + 1
        self.generated[request_id] = 0
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
                pooling_params=None,
                arrival_time=arrival_s,
                priority=priority,
                lora_request=None if lora is None else LoRARequest(f"lora-{lora}", lora, "/loras"),
                block_hasher=self.hasher,
            )
        )

    def abort(self, request_id):
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self, throttle):
        before = dict(self.scheduler.requests)
        running = {r.request_id for r in self.scheduler.running}
        self.output = self.scheduler.schedule(throttle)
        preempted = [i for i in running if before[i].status == RequestStatus.PREEMPTED]
        return {
            "tokens": sorted(self.output.num_scheduled_tokens.items()),
            "preempted": sorted(preempted),
        }

    def complete(self):
        output, self.output = self.output, None
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            ends = request is not None and request.num_computed_tokens >= request.num_tokens
            index = self.generated[request_id]
            self.generated[request_id] += ends
            sampled.append([100_000 + self.numbers[request_id] * 1_000 + index] if ends else [])
        events = []
        for event in self.scheduler.kv_cache_manager.take_events():
            if isinstance(event, BlockStored):
                events.append(["stored", event.block_hashes, event.parent_block_hash])
            else:
                events.append(["removed", event.block_hashes])
        answer = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        tokens, finished = [], []
        for message in answer.values():
            for token in message.outputs:
                tokens += [token.request_id] * len(token.new_token_ids)
                if token.finish_reason is not None:
                    finished.append(token.request_id)
            if message.scheduler_stats is not None:
                self.queries += message.scheduler_stats.prefix_cache_stats.queries
                self.hits += message.scheduler_stats.prefix_cache_stats.hits
        return {"tokens": sorted(tokens), "finished": sorted(finished), "events": events}

    def state(self):
        running, waiting = self.scheduler.get_request_counts()
        return {
            "running": running,
            "waiting": waiting,
            "deferred": len(self.scheduler.deferred_waiting),
            "usage": round(self.scheduler.kv_cache_manager.usage, 6),
            "queries": self.queries,
            "hits": self.hits,
        }

    def play(self, name, *arguments):
        answer = getattr(self, name)(*arguments)
        return [answer, self.state()]


def main():
    init_none_hash(sha256_cbor)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        for line in sys.stdin:
            case = json.loads(line)
            player = Player(case, folder)
            print("ANSWER " + json.dumps([player.play(*step) for step in case["script"]]), flush=True)


if __name__ == "__main__":
    main()
