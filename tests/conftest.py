"""Settings of the whole test suite."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadlines: a shared machine may be slow at any moment, and no test is about speed. Examples are the same
# in every run; `HYPOTHESIS_PROFILE=explore make test` looks for new ones.
settings.register_profile("explore", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
