"""Strategies of Lightning whose checkpoints go to runs: the parts that Trainer's and Fabric's have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.runs import require_settings

if TYPE_CHECKING:
    from lightning.fabric.strategies import Strategy as _Strategy
else:
    _Strategy = object  # each subclass stands before a strategy of Lightning, whose methods `super()` finds


class RunStrategy(_Strategy):
    """Base of both: settings of the runs.

    Args:
        arguments: Arguments of Lightning's strategy.
        checkpoint_settings: Keyword arguments of `CheckpointManager` for all runs, such as `storage_options`.
        options: Keyword arguments of Lightning's strategy.
    """

    def __init__(self, *arguments: Any, checkpoint_settings: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Make Lightning's strategy; no request is sent."""
        super().__init__(*arguments, **options)
        self._settings = dict(checkpoint_settings or {})
        require_settings(self._settings)


def refuse_url(url: Any, strategy: Any, *, module: str, user: str) -> None:
    """Refuse a URL for a strategy of Lightning that writes folders: it would make a local folder of that name.

    Args:
        url: URL.
        strategy: Strategy of Lightning.
        module: Module of the strategies that take URLs.
        user: Class to which a strategy is passed.

    Raises:
        InvalidArgumentError: Always.
    """
    name = type(strategy).__name__
    raise InvalidArgumentError(
        f"{name} writes to local folders alone. Pass Remote{name} of {module} to {user}.", url=url
    )
