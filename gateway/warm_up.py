"""One small request to a rank, past the gateway: to warm it up before it serves, or to see whether it lives.

Must never be sent to a rank that is in rotation: it would be load that nobody has decided about.
"""

from __future__ import annotations

import aiohttp
import msgspec

PROMPT = "Hello"
MAX_ANSWER_BYTES = 1 << 20


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def complaint(
    session: aiohttp.ClientSession, endpoint: str, model: str, timeout_s: float
) -> str | None:
    """Why the rank at `endpoint` cannot serve `model`; `None` if it has answered a request.

    An answer that only refuses the request, as a model without completions does, is the answer of a rank that
    works. A rank that drains answers 200 and has aborted the request (vLLM 0.32 vllm/v1/engine/core.py).
    """
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
    try:
        async with session.post(
            f"http://{endpoint}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
        ) as answer:
            text = await answer.content.read(MAX_ANSWER_BYTES)
    except TimeoutError:
        return f"a request was not answered within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"a request failed: {error}"
    if answer.status >= 500:
        return f"a request was answered {answer.status}"
    if answer.status == 200 and _is_aborted(text):
        return "a request was aborted: it is shutting down"
    return None


def _is_aborted(text: bytes) -> bool:
    try:
        completion = msgspec.json.decode(text, type=_Completion)
    except msgspec.DecodeError:
        return False
    return any(choice.finish_reason == "abort" for choice in completion.choices)
