"""Examples of property tests: the same ones in each short run, few or many; others in the long campaign."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.support.figures import LONG_SECONDS

# As many as the slowest property can run within the time limit of a test, on a busy machine.
_TIMES_AS_MANY = 5

_EXAMPLES = settings().max_examples

# Examples of each property in `make test`; the campaign runs all.
SMOKE_EXAMPLES = 10

# No time limit for an example, since any can be slow on a busy machine. Derandomized, so that a commit always passes.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("smoke", settings.get_profile("same"), max_examples=SMOKE_EXAMPLES)
settings.register_profile(
    "exploring", deadline=None, derandomize=False, print_blob=True, max_examples=_TIMES_AS_MANY * _EXAMPLES
)


def load_profile(torture_seconds: float, *, is_smoke: bool = False) -> None:
    """Choose the profile of all properties of this process; call before any of them is imported."""
    is_exploring = torture_seconds >= LONG_SECONDS and not is_smoke
    settings.load_profile("smoke" if is_smoke else "exploring" if is_exploring else "same")
    if not is_exploring:
        # Examples otherwise have constants of loaded modules, which differ between workers and selections of tests.
        providers.is_local_module_file = lambda _path: False  # type: ignore[attr-defined]  # no public switch; pinned


def examples(count: int) -> settings:
    """Return settings with `count` examples in a short run; for large examples, which are slow to draw."""
    tried = max(1, count * settings().max_examples // _EXAMPLES)
    return settings(max_examples=tried, suppress_health_check=list(HealthCheck))
