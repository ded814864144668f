"""Examples that a property is tried on: the same ones each time, a few or many; in the long campaign others."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.figures import LONG_SECONDS

# As many as the slowest property can try within the time limit of a test, on a busy machine.
_TIMES_AS_MANY = 5

_EXAMPLES = settings().max_examples

# What `make test` tries of each property; the campaign tries all.
SMOKE_EXAMPLES = 10

# No example is too slow: on a busy machine any can be. The same commit must not pass today and fail tomorrow.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("smoke", settings.get_profile("same"), max_examples=SMOKE_EXAMPLES)
settings.register_profile(
    "exploring", deadline=None, derandomize=False, print_blob=True, max_examples=_TIMES_AS_MANY * _EXAMPLES
)


def load_profile(torture_seconds: float, *, is_smoke: bool = False) -> None:
    """Choose for all properties of this process; to be called before any of them is imported."""
    settings.load_profile("smoke" if is_smoke else "exploring" if torture_seconds >= LONG_SECONDS else "same")


def examples(count: int) -> settings:
    """Settings of a property that tries `count` examples where the same are tried; for large examples, drawn slowly."""
    tried = max(1, count * settings().max_examples // _EXAMPLES)
    return settings(max_examples=tried, suppress_health_check=list(HealthCheck))
