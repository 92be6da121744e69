"""The gateway's picture as plain data: what `/status` answers, and `wavegate status` shows.

Reads the decision's objects, changes nothing. What is not known is null.
"""

from __future__ import annotations

from typing import Any

from ext_proc.accounts import RankAccount
from ext_proc.admission import Admission
from ext_proc.groups import GroupAccount
from ext_proc.ledger import Ledger
from gateway import __version__
from gateway.config import Config


def status(config: Config, ledger: Ledger, admission: Admission, now_s: float) -> dict[str, Any]:
    """Groups, ranks, and what is held, at this moment."""
    targets = config.gateway.targets
    engines = {group.name: group.engine for group in config.groups}
    models = {group.name: group.model for group in config.groups}
    return {
        "version": __version__,
        "policy": config.gateway.policy,
        "targets": {"ttft_ms": targets.ttft_ms, "tpot_ms": targets.tpot_ms},
        "held": {"requests": admission.held_requests, "tokens": admission.held_tokens},
        "sessions": len(ledger.sessions),
        "groups": [_group(group, engines[group.name]) for group in ledger.groups],
        "ranks": [
            _rank(account, models[account.rank.group], ledger.state(account, now_s).value, now_s)
            for account in ledger.accounts
        ],
    }


def _group(group: GroupAccount, engine: str) -> dict[str, Any]:
    costs = group.times.costs
    return {
        "name": group.name,
        "engine": engine,
        "healthy": group.is_healthy and group.in_rotation,
        "lock_step": group.lock_step,
        "decode_step_ms": round(group.decode_step_s * 1e3, 2),
        "prefill_step_ms": round(group.prefill_step_s * 1e3, 2),
        "prefill_tokens_per_s": round(group.prefill_tokens_per_s),
        "budget_tokens": round(group.times.budget_tokens) if group.times.budget_is_known else None,
        "is_prefilling": group.is_prefilling,
        "lead_tokens": round(group.lead.tokens, 1),
        "decoding_sequences": group.decoding_sequences,
        "kv_tokens": round(group.longest_kv_tokens),
        "observations": group.times.observations,
        "step_time": {
            "fixed_ms": costs.fixed_s * 1e3,
            "prefill_us_per_token": costs.per_prefill_token_s * 1e6,
            "decode_us_per_sequence": costs.per_decode_sequence_s * 1e6,
            "kv_ns_per_token": costs.per_kv_token_s * 1e9,
        },
        "index_blocks": sum(len(account.cache) for account in group.accounts),
        "index_bytes": sum(account.cache.memory_bytes() for account in group.accounts),
        "prompts_found": sum(account.cache.prompts_found for account in group.accounts),
        "prompts_missing": sum(account.cache.prompts_missing for account in group.accounts),
    }


def _rank(account: RankAccount, model: str, state: str, now_s: float) -> dict[str, Any]:
    rank, report = account.rank, account.report
    prefilling = account.prefills.begun(now_s, account.group.prefill_tokens_per_s)
    return {
        "rank": rank.name,
        "group": rank.group,
        "index": rank.index,
        "endpoint": rank.endpoint,
        "model": model,
        "state": state,
        "running": report.running if report else None,
        "waiting": report.waiting if report else None,
        "kv_cache_usage": report.kv_cache_usage if report else None,
        "wave": report.wave if report else None,
        "adapters": sorted(account.adapters),
        "report_age_s": round(now_s - report.taken_at_s, 3) if report else None,
        "reservations": account.reservations,
        "unobserved": len(account.unobserved),
        "queued": len(account.prefills) - prefilling,
        "prefilling": prefilling,
        "decoding": account.reservations - len(account.prefills),
        "picks": account.picks,
    }
