"""Policies: pure functions from request facts and a ledger view to a cost per rank."""
