"""Arguments of commands: each is declared once, in the annotation of the parameter of the command that gets its value.

    def pin(out: Output, url: Url, *, undo: Annotated[bool, flag("unpin")] = False) -> None:

A parameter before the `*` is a positional argument, one behind it an option. argparse itself parses: it costs users no
dependency, and the command line starts in a tenth of the time that click takes to import.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from dcp_remote.common.text import shorten
from dcp_remote.common.units import GiB, KiB, MiB
from dcp_remote.storage.options import LIMIT_OPTIONS
from dcp_remote.storage.url import is_remote, parse_url

# Storage options that have an option of their own; all others are given by --option.
_OWN_OPTIONS = {"endpoint_url": "--endpoint-url", "profile_name": "--profile", "region_name": "--region"}

# Name of a storage option in a message: `storage_options['anon'] = True`.
_STORAGE_OPTION = re.compile(r"storage_options(?:\['(\w+)'\](?: = '?(\w+)'?)?)?")

# Digits of a step, or of the number of --keep-best: Python refuses to read some thousands, and a message repeats them.
DIGITS_MAX = 60

_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": KiB, "MiB": MiB, "GiB": GiB}


@dataclass(frozen=True, slots=True)
class Argument:
    """Declaration of an argument.

    Attributes:
        name: Option, such as `--json`; empty for that of the parameter's name.
        settings: Keywords of `argparse.ArgumentParser.add_argument`.
    """

    name: str
    settings: Mapping[str, Any]


def argument(name: str = "", **settings: Any) -> Argument:
    """Declare an argument by the keywords of `argparse.ArgumentParser.add_argument`."""
    return Argument(name, settings)


def flag(text: str) -> Argument:
    """Declare an option without a value; `text` tells what the option does."""
    return Argument("", {"action": "store_true", "help": text})


class CommandParser(argparse.ArgumentParser):
    """Parser that refuses arguments which it cannot place with the usage of its command, not that of `dcp-remote`."""

    def add_arguments_of(self, command: Callable[..., object]) -> None:
        """Add the arguments that the parameters of a command declare."""
        for parameter, declared in _find_arguments(command):
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                self.add_argument(parameter.name, **declared.settings)
                continue
            is_required = parameter.default is inspect.Parameter.empty
            default = {"required": True} if is_required else {"default": parameter.default}
            self.add_argument(_option_of(parameter, declared), dest=parameter.name, **default, **declared.settings)

    def parse_known_args(  # type: ignore[override]  # argparse alone calls this, with both by their places
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments of the command; exit with 2 if any are left."""
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            # Not what follows them, which may be a secret.
            names = [one.partition("=")[0] for one in left if one.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(names or left)}")
        return parsed, left


def describe_options(command: Callable[..., object]) -> dict[str, str]:
    """Return what to write in place of an argument that an error advises to pass, by the argument's name."""
    return {
        parameter.name: f"{_option_of(parameter, declared)} ({declared.settings['help']})"
        for parameter, declared in _find_arguments(command)
    }


def name_options(message: str, command: Callable[..., object]) -> str:
    """Return a message that names options of the command line in place of Python's arguments.

    These are a first word that is an option of the command, and entries of `storage_options`.
    """
    subject, space, rest = message.partition(" ")
    for parameter, declared in _find_arguments(command):
        if parameter.name == subject and parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            message = _option_of(parameter, declared) + space + rest

    def name_option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name is None:
            return "--option"
        return _OWN_OPTIONS.get(name, f"--option {name}") + (f"={value.lower()}" if value else "")

    return _STORAGE_OPTION.sub(name_option, message)


def _find_arguments(command: Callable[..., object]) -> Iterator[tuple[inspect.Parameter, Argument]]:
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        for declared in getattr(parameter.annotation, "__metadata__", ()):
            yield parameter, declared


def _option_of(parameter: inspect.Parameter, declared: Argument) -> str:
    return declared.name or f"--{parameter.name.replace('_', '-')}"


# ---- values


def parse_step(text: str) -> int | str:
    """Return digits as a step, any other text as a name or a word for the newest checkpoint (`NEWEST_WORDS`).

    A name of digits alone is only given to its own step.
    """
    if not text.isdecimal():
        return text
    if len(text) > DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"a step has at most {DIGITS_MAX} digits: {shorten(text)}")
    return int(text)


def parse_bytes(text: str) -> int:
    """Parse a size such as `8MiB`, `64KB` or a number of bytes."""
    found = re.fullmatch(r"(\d+)([KMG]i?B|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a size like 8MiB, 64KB or 268435456: {text}")
    return int(found[1]) * _BYTES[found[2]]


def parse_pair(text: str, *, form: str = "OLD=NEW") -> tuple[str, str]:
    """Split a text at its first equals sign."""
    name, equals, value = text.partition("=")
    if not equals:
        # Not the text itself, which may be a secret.
        raise argparse.ArgumentTypeError(f"must have the form {form}; one has no equals sign")
    return name, value


def parse_setting(text: str) -> tuple[str, object]:
    """Parse a storage option: `true` and `false` are flags, limits and times are numbers, all else is text."""
    name, value = parse_pair(text, form="NAME=VALUE")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    if name in LIMIT_OPTIONS or name.endswith("_seconds"):
        for number in (int, float):
            with suppress(ValueError):
                return name, number(value)
    return name, value


class AddPair(argparse.Action):
    """Action of an option that adds a pair to a dict."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        """Add the pair that the option's type has made."""
        name, value = values
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), name: value})


def _own_option(name: str, metavar: str, text: str) -> Argument:
    def parse(value: str) -> tuple[str, str]:
        return name, value

    return argument(_OWN_OPTIONS[name], type=parse, action=AddPair, metavar=metavar, help=text)


def _any_option(name: str, text: str) -> Argument:
    return argument(name, type=parse_setting, action=AddPair, metavar="NAME=VALUE", help=f"{text}; repeatable")


# ---- arguments of several commands

Url: TypeAlias = Annotated[str, argument(help="s3://bucket/checkpoint-or-run, gs://…, az://…, file:///…, or a path")]

StorageOptions: TypeAlias = Annotated[
    Mapping[str, object] | None,
    _own_option("endpoint_url", "URL", "URL of an S3-compatible server"),
    _own_option("profile_name", "NAME", "profile of the AWS configuration"),
    _own_option("region_name", "NAME", "region of the bucket"),
    _any_option("--option", "any other storage option"),
]

SourceOptions: TypeAlias = Annotated[
    Mapping[str, object] | None,
    _any_option("--source-option", "storage option of the first URL alone, beside the others"),
]

Step: TypeAlias = Annotated[
    int | str | None,
    argument(type=parse_step, metavar="N|NAME", help="checkpoint of a run, by step or name (default: the newest)"),
]


def split_options(
    source: str, url: str, own: Mapping[str, object] | None, shared: Mapping[str, object] | None
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the storage options of a source, which may have its own, and those of the other URL.

    The shared ones are for both if they are the same kind of object storage; else for the one that is object storage,
    or for the other URL.
    """
    own, shared = dict(own or {}), dict(shared or {})
    if not is_remote(source):
        return own, shared
    if not is_remote(url):
        return shared | own, {}
    is_one_kind = parse_url(source).scheme == parse_url(url).scheme
    return (shared | own if is_one_kind else own), shared
