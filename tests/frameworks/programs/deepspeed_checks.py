"""Errors and warnings of a call, for the cases."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def raised(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return class and text of the error of a call; "" if there is none."""
    try:
        function(*arguments, **options)
    except Exception as error:  # noqa: BLE001  # whatever it is, is compared
        return f"{type(error).__name__}: {error}"
    return ""


def warnings_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Return the texts that dcp_remote logs in a call, from warnings on."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("dcp_remote").addHandler(handler)
    try:
        function(*arguments, **options)
    finally:
        logging.getLogger("dcp_remote").removeHandler(handler)
    return texts
