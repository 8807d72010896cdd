"""
Hypothesis profiles: ``dev`` by default, ``ci`` where CI is set, HYPOTHESIS_PROFILE for any other.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_ANY = {
    "deadline": None,
    "suppress_health_check": (HealthCheck.too_slow, HealthCheck.data_too_large),
}

settings.register_profile("dev", max_examples=25, stateful_step_count=20, **_ANY)
settings.register_profile(
    "ci", max_examples=150, stateful_step_count=40, derandomize=True, print_blob=True, **_ANY
)
settings.register_profile(
    "nightly", max_examples=2_000, stateful_step_count=60, print_blob=True, **_ANY
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
