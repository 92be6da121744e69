"""The admin API's `POST /explain`: what would be decided about a request now, and why; nothing is reserved.

The body is a request's; its path is the query parameter `path`, and the headers that a request can have for
the gateway (priority, tenant, session) are read here too. Bound to loopback unless the configuration says
otherwise; what it is sent is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from ext_proc.admission import Admission, Prospect
from ext_proc.decision import Refused
from ext_proc.explanation import PRIORITY_IGNORED
from ext_proc.facts import BodyFields, Tokenise, call_kind, facts_of, parse, with_tokens
from ext_proc.ledger import Ledger
from ext_proc.picker import Busy
from ext_proc.request_head import HeadNames, RequestHead, head_of_values
from ext_proc.vocabulary import CallKind, Pick, RequestFacts
from vllm_ranks.reports.asking import TooLong, read_at_most

DEFAULT_PATH = "/v1/chat/completions"


def explanation(
    facts: RequestFacts, prospect: Prospect, ledger: Ledger, admission: Admission
) -> dict[str, Any]:
    """A prospect as plain data."""
    return {
        "request": {
            "kind": facts.kind.value,
            "model": facts.model,
            "prompt_tokens": facts.prompt_tokens,
            "prompt_is_exact": facts.tokens is not None,
            "expected_output_tokens": ledger.output_lengths.expected(facts),
            "priority": facts.priority,
        },
        **_outcome(prospect),
        "held": {"requests": admission.held_requests, "tokens": admission.held_tokens},
        "ranks": [
            {
                "rank": cost.rank.name,
                "readiness": readiness.name.lower(),
                "cost": cost.cost,
                "parts": dict(cost.parts),
                "cached_tokens": cost.cached_tokens,
            }
            for cost, readiness in prospect.ranks
        ],
    }


def _outcome(prospect: Prospect) -> dict[str, Any]:
    outcome = prospect.outcome
    if isinstance(outcome, Pick):
        ranks = [rank.name for rank in outcome.ranks]
        return {"outcome": "place", "picked": ranks, "reason": outcome.reason.value}
    if isinstance(outcome, Refused):
        return {"outcome": "refuse", "status": outcome.status, "reason": outcome.reason.value}
    return {"outcome": "hold", "until": outcome.account.rank.name if isinstance(outcome, Busy) else "a phase"}


def _notes(
    head: RequestHead, fields: BodyFields | None, facts: RequestFacts, ledger: Ledger
) -> Iterator[str]:
    """What a person may not have meant, and what becomes of it."""
    default = next(iter(ledger.pools.default.groups[0].models), "the first group")
    if facts.model is None and facts.kind is not CallKind.OTHER:
        missing = "the body is not a JSON object" if fields is None else "the body names no model"
        yield (
            f"{missing}: a rank of {default} gets it, chosen by what could be read, and answers it; in the "
            "endpoint_picker modes it is answered 400 (gateway.endpoint_picker.pass_malformed_bodies)"
        )
    elif facts.model is not None and not ledger.pools.knows(facts.model):
        yield f"no group is known to serve {facts.model!r}: a rank of {default} gets it, and answers it"
    if head.priority_is_ignored:
        yield PRIORITY_IGNORED


def explain_routes(
    ledger: Ledger,
    admission: Admission,
    names: HeadNames,
    max_body_bytes: int,
    tokenise: Tokenise | None,
) -> list[web.RouteDef]:
    """The route `/explain`."""

    async def post_explain(request: web.Request) -> web.Response:
        try:
            body = await read_at_most(request.content, max_body_bytes)
        except TooLong:
            length = request.content_length or max_body_bytes + 1  # a chunked one may be longer
            raise web.HTTPRequestEntityTooLarge(max_size=max_body_bytes, actual_size=length) from None
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = request.query.get("path", DEFAULT_PATH)
        head, fields = head_of_values(headers, names), parse(body)
        facts = head.complete(with_tokens(facts_of(call_kind(path), fields, "explain"), body, tokenise))
        explained = explanation(facts, admission.prospect(facts, time.monotonic()), ledger, admission)
        explained["notes"] = list(_notes(head, fields, facts, ledger))
        return web.Response(body=msgspec.json.encode(explained), content_type="application/json")

    return [web.post("/explain", post_explain)]
