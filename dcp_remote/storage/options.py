"""Options of a store (`storage_options`), checked and under one name each.

The names are those of boto3 and of fsspec's file systems. The options of each cloud are declared in its own module.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from dcp_remote.errors import InvalidArgumentError

# User info, a query or a fragment, which may contain a secret.
_MAY_HOLD_SECRET = re.compile(r"[@?#]")

# Types of values by the annotation of the option, and their description.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str | None": ((str,), "a string that is not empty"),
    "bool": ((bool,), "True or False"),
    "float": ((int, float), "a positive number"),
    "int | None": ((int,), "an integer above zero"),
    "float | None": ((int, float), "a number above zero"),
    "bool | str | None": ((bool, str), "True, False or the path of a file of certificates"),
}


def option(default: Any = None, *aliases: str, secret: bool = False, choices: tuple[str, ...] = ()) -> Any:
    """Return the field of an option; a secret one is shown nowhere."""
    return field(default=default, repr=not secret, metadata={"aliases": aliases, "secret": secret, "choices": choices})


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of every store: limits of the requests of one process; None for no limit."""

    requests_in_flight: int | None = option()  # at a time
    upload_bytes_per_second: float | None = option()
    download_bytes_per_second: float | None = option()


LIMIT_OPTIONS = tuple(field_.name for field_ in fields(StoreOptions))


@dataclass(frozen=True, slots=True)
class LocalOptions(StoreOptions):
    """Options of a store of files; see `LocalStore`."""

    allow_network_replace: bool = option(default=False)


@dataclass(frozen=True, slots=True)
class CloudOptions(StoreOptions):
    """Options of every cloud."""

    endpoint_url: str | None = option()  # of a server other than the cloud's own
    anon: bool = option(default=False)  # True sends no credentials: reads of public buckets only
    verify: bool | str | None = option()  # False accepts any certificate; or a file of certificates to trust
    # A TCP connection takes a few round trips; within ten seconds a lost SYN is sent again three times.
    connect_timeout_seconds: float = option(10.0)

    def secrets(self) -> list[str]:
        """Return all secrets among the options."""
        given = [getattr(self, field_.name) for field_ in fields(self) if field_.metadata["secret"]]
        return [secret for secret in given if secret]


Options = TypeVar("Options", bound=StoreOptions)


def parse_options(options_class: type[Options], options: Mapping[str, object], *, scheme: str = "") -> Options:
    """Check `storage_options` and return them under one name each. A value of None counts as not given.

    Raises:
        InvalidArgumentError: A name is unknown (the message lists the known ones, and names the scheme of the URL if it
            is given), or a value has the wrong type. No message shows a text, since it may be a secret.
    """
    known = {field_.name: field_ for field_ in fields(options_class)}
    names = {alias: name for name, field_ in known.items() for alias in (name, *field_.metadata["aliases"])}
    if unknown := sorted(str(given) for given in options if given not in names):
        near = difflib.get_close_matches(unknown[0], names, n=1)
        where = (f" for {scheme} URLs" if scheme else "") + (f"; the closest is {near[0]!r}" if near else "")
        what = f"Unknown name in storage_options{where}. Known: {', '.join(sorted(known))}."
        raise InvalidArgumentError(what, unknown=", ".join(unknown))
    values: dict[str, Any] = {}
    for given, value in options.items():
        if value is not None:
            name = names[given]
            checked = _check(given, value, str(known[name].type), known[name].metadata["choices"])
            if values.setdefault(name, checked) != checked:
                raise InvalidArgumentError("storage_options give one setting twice, with different values.", name=name)
    if values.get("endpoint_url") is not None:
        check_endpoint(values["endpoint_url"], named="storage_options['endpoint_url']")
    return options_class(**values)


def _check(name: str, value: object, kind: str, choices: tuple[str, ...]) -> str | bool | float:
    types, expected = _KINDS[kind]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool):
        is_valid = bool in types
    elif isinstance(value, str):
        is_valid = str in types and bool(value) and (not choices or value in choices)
    else:
        is_valid = isinstance(value, int | float) and isinstance(value, types) and 0 < value < math.inf
    if is_valid:
        return value  # type: ignore[return-value]  # of one of the types by now
    expected = f"one of {', '.join(choices)}" if choices else expected
    shown = value if isinstance(value, int | float) and str not in types else None  # a text may be a secret
    raise InvalidArgumentError(f"storage_options[{name!r}] must be {expected}.", value=shown, type=type(value).__name__)


def check_endpoint(url: str, *, named: str) -> None:
    """Refuse an endpoint that may contain a secret, which errors, logs and reprs would show, or that is not http(s).

    Raises:
        InvalidArgumentError: The URL has user info, a query or a fragment, and the message does not show the URL; or
            the scheme is not http or https.
    """
    if _MAY_HOLD_SECRET.search(url):
        raise InvalidArgumentError(
            f"{named} contains a user, a password, a query or a fragment; an endpoint has only scheme, host and port. "
            "Give credentials under their own names (aws_access_key_id and aws_secret_access_key, sas_token), "
            "in storage_options or the environment."
        )
    if not url.lower().startswith(("http://", "https://")):
        raise InvalidArgumentError(f"{named} must begin with http:// or https://.", endpoint=url)


def find_environment_endpoint(*names: str) -> str | None:
    """Return the endpoint in the environment, which obstore would read by itself without a check; None if unset."""
    for name in names:
        if url := os.environ.get(name):
            check_endpoint(url, named=name)
            return url
    return None
