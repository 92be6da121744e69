"""Writes chats as prompts with vLLM's own code: for each template, each request; null where vLLM refuses."""

import json
import sys

from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import HfRenderer
from vllm.tokenizers import get_tokenizer


def written(renderer, template, request):
    try:
        parsed = ChatCompletionRequest(**request)
        tools = None if parsed.tools is None else [tool.model_dump() for tool in parsed.tools]
        params = parsed.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False})
        _, prompt = renderer.render_messages(parsed.messages, params)
    except Exception as error:
        print(f"refused: {error!r}", file=sys.stderr)
        return None
    return prompt["prompt"]


def main() -> None:
    question = json.loads(sys.stdin.readline())
    folder = question["folder"]
    config = VllmConfig(model_config=ModelConfig(model=folder, tokenizer=folder, dtype="bfloat16"))
    renderer = HfRenderer(config, get_tokenizer(folder))
    answers = [
        [written(renderer, template, request) for request in question["requests"]]
        for template in question["templates"]
    ]
    print("ANSWER " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
