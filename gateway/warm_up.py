"""One small request to a rank, past the gateway: to warm it up before it serves, or see whether it works."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
import msgspec

from vllm_ranks.reports.asking import TooLong, read_at_most, shortened

FULL = 503
"""vLLM's answer when a queue limit is reached."""
PROMPT = [1]
"""A token: text would wait for the rank's tokenizer, behind others' prompts, before an engine sees it."""
MAX_ANSWER_BYTES = 1 << 20


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Complaint:
    """Why a rank has not served a request."""

    reason: str
    is_late: bool = False
    """Whether the answer has only not come yet."""


async def complaint(
    session: aiohttp.ClientSession, endpoint: str, model: str, timeout_s: float
) -> Complaint | None:
    """Why the rank at `endpoint` cannot serve `model`; `None` if it has answered a request.

    An answer that only refuses the request, as a model without completions or a full rank does, is the answer
    of a rank that works. One that drains may answer 200 and have aborted the request, or answer 500.
    """
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
    url, timeout = f"http://{endpoint}/v1/completions", aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(url, json=body, timeout=timeout, allow_redirects=False) as answer:
            text = await read_at_most(answer.content, MAX_ANSWER_BYTES)
    except TimeoutError:
        return Complaint(f"a request was not answered within {timeout_s:g} s", is_late=True)
    except (aiohttp.ClientError, OSError) as error:
        return Complaint(f"a request failed: {shortened(str(error))}")
    except TooLong as error:
        return Complaint(f"the answer to a request is {error}")
    if answer.status >= 500 and answer.status != FULL:
        return Complaint(f"a request was answered {answer.status}")
    if answer.status == 200 and _is_aborted(text):
        return Complaint("a request was aborted: it is shutting down")
    return None


def _is_aborted(text: bytes) -> bool:
    try:
        completion = msgspec.json.decode(text, type=_Completion)
    except msgspec.DecodeError:
        return False
    return any(choice.finish_reason == "abort" for choice in completion.choices)
