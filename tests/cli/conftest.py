"""Fixture of all commands."""

from __future__ import annotations

import pytest

from tests.support.command_line import CommandLine


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Return the command line, whose output is captured."""
    return CommandLine(capsys)
