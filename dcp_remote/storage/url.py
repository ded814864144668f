"""URLs and keys: parse, check and join.

Pure functions on text, except that a relative path is made absolute by the working directory. A URL never contains
credentials, and errors never show a part of a URL that could be a secret.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias
from urllib.parse import quote, unquote

from dcp_remote.errors import InvalidArgumentError

Scheme: TypeAlias = Literal["s3", "gs", "az", "file", "memory"]

_EXAMPLES: dict[Scheme, str] = {
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "file": "file:///path",
    "memory": "memory://name/prefix",
}
SCHEMES: tuple[Scheme, ...] = tuple(_EXAMPLES)

_KNOWN = f"{', '.join(_EXAMPLES.values())}, or a path"

_FILE_SYSTEMS = "A file system of s3fs is opened by `dcp_remote.storage.open_fsspec_store(filesystem, path)`."

# Schemes by which other tools name the same stores.
_ALIASES: dict[str, Scheme] = {
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "wasb": "az",
    "wasbs": "az",
    "local": "file",
    "mem": "memory",
}
_WEB = ("http", "https")
_MEANT: dict[str, Scheme] = {scheme: scheme for scheme in SCHEMES} | _ALIASES

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)

# Misspelled URLs, which are hardly ever meant as paths. First those that pathlib, `os.path.abspath` and `os.path.join`
# make of one, or that have a user before them: `s3:/bucket`, `/cwd/s3:/bucket`, `runs/s3://bucket`, `me:pw@s3://bucket`.
# Then `s3:bucket` and `s3//bucket`. `./s3:/x` and file URLs name folders like that.
_NAMES = "|".join((*_MEANT, *_WEB))
_MISSPELLED = (
    re.compile(rf"(?!\./[^/]+:)(?:.*?[/@\s])?(?P<scheme>{_NAMES}):/+(?P<rest>[^/].*)", re.DOTALL | re.IGNORECASE),
    re.compile(rf"(?P<scheme>{'|'.join(_MEANT)})(?::|//)(?P<rest>[^/].*)", re.DOTALL | re.IGNORECASE),
)

# A path that `pathlib` makes of a URL of another kind: `hdfs:/host`.
_OTHER_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/.*", re.DOTALL)

# Permissive, since each store checks its own rules. `$` is for Azure's $root; `:`, `@` and `%` would be user info or an
# escape.
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9$._-]*")

# Objects of a checkpoint or run, whose keys `format/keys.py` makes; a URL pasted from a listing may end in one.
_OWN_OBJECT = re.compile(
    r"(?P<above>.*?)/(catalog\.json|manifest\.json|manifests/step-\d{12,}-\d+-[0-9a-f]{16}\.json"
    r"|shards/[0-9a-f]{2}/[^/]+\.safetensors)",
    re.DOTALL,
)

_BAD_PART = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")
# Backslashes are separators in some stores and Windows tools; surrogates cannot be encoded.
_BAD_CHARACTER = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%2[Ff]|%00")


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """URL or path of a store, in parts."""

    scheme: Scheme
    bucket: str  # bucket, container or name of a memory store; empty for files
    prefix: str  # prefix of all keys, without slashes at its ends, or empty; for files the path without its first slash

    @property
    def canonical(self) -> str:
        """Unique spelling of this URL: `parse_url(parsed.canonical) == parsed`."""
        if self.scheme == "file":
            return f"file:///{quote(self.prefix)}"
        return f"{self.scheme}://{self.bucket}/{self.prefix}" if self.prefix else f"{self.scheme}://{self.bucket}"

    @property
    def path(self) -> str:
        """Absolute path of a `file` URL."""
        assert self.scheme == "file"
        return f"/{self.prefix}"

    def key(self, key: str) -> str:
        """Return a key below this URL as the bucket, or the file system, names it. Checks the key."""
        check_key(key)
        return f"{self.prefix}/{key}" if self.prefix else key

    def child(self, key: str) -> ParsedUrl:
        """Return the URL of `key` below this one. Checks the key."""
        return ParsedUrl(self.scheme, self.bucket, self.key(key))

    def parent(self) -> ParsedUrl | None:
        """Return the URL of the folder above this one; None for a whole bucket, and for the root of files."""
        return ParsedUrl(self.scheme, self.bucket, self.prefix.rpartition("/")[0]) if self.prefix else None


def check_key(key: str) -> None:
    """Refuse the key of an object, or the prefix of a child store, with `InvalidArgumentError` if no store takes it."""
    if _BAD_PART.search(key) or _BAD_CHARACTER.search(key):
        raise InvalidArgumentError(
            "Invalid key: it must be relative, with single slashes between parts other than `.` and `..`, and without "
            "backslashes and control characters.",
            key=key,
        )


def check_list_prefix(prefix: str) -> None:
    """Refuse a prefix for `list` with which no valid key begins; a valid one may end within a part."""
    folder, slash, name = prefix.rpartition("/")
    if slash:
        check_key(folder)
    if _BAD_CHARACTER.search(name):
        check_key(name)


def is_remote(url: object) -> bool:
    """Return whether this is the URL of object storage, and so no path of a local file. Never raises; no request.

    True for `s3://`, `gs://`, `az://` and `memory://`, for the schemes by which other tools name them (`s3a://`,
    `gcs://`, `abfs://`, …), and for such a URL that was made a path (`s3:/bucket/x`, `/cwd/s3:/bucket/x`): every call
    that takes a URL refuses the latter two kinds, and says what to write. False for paths, `file://`, and URLs of other
    kinds.

    Args:
        url: Text or path; any other value is not remote.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str):
        return False
    match = _URL.fullmatch(text.strip()) or _match_misspelled(text)
    return match is not None and _MEANT.get(match["scheme"].lower(), "file") != "file"


def parse_url(url: str | os.PathLike[str]) -> ParsedUrl:
    """Parse the URL or path of a checkpoint or run; an `InvalidArgumentError` says what to write instead.

    `s3://`, `gs://`, `az://` and `memory://` URLs are taken literally (not percent-decoded, as in all tools for them);
    `file:///` URLs are percent-decoded (RFC 8089); everything else is a path, which is made absolute now.
    """
    given: object = url  # users may pass any type
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str):
        raise InvalidArgumentError(f"The URL must be a str or a path of str. {_FILE_SYSTEMS}", type=type(text).__name__)
    if not text.strip():
        raise InvalidArgumentError(f"The URL is empty. Write {_KNOWN}.")
    if match := _URL.fullmatch(text):
        parsed = _parse_with_scheme(text, scheme=match["scheme"].lower(), rest=match["rest"])
    elif match := _match_misspelled(text):
        _refuse_misspelled(match["scheme"].lower(), match["rest"])
    elif "://" in text or _OTHER_URL.fullmatch(text):  # not shown: it may hold a secret
        raise InvalidArgumentError(f"This is no URL that can be opened. Write {_KNOWN}. {_FILE_SYSTEMS}")
    else:
        parsed = _parse_path(text)
    if match := _OWN_OBJECT.fullmatch(f"/{parsed.prefix}"):
        above = ParsedUrl(parsed.scheme, parsed.bucket, match["above"].lstrip("/"))
        raise InvalidArgumentError(
            f"The URL names an object of a checkpoint or run. Pass the URL above it, {above.canonical}.",
            url=parsed.canonical,
        )
    return parsed


def _match_misspelled(text: str) -> re.Match[str] | None:
    return _MISSPELLED[0].fullmatch(text) or _MISSPELLED[1].fullmatch(text)


def _parse_with_scheme(text: str, *, scheme: str, rest: str) -> ParsedUrl:
    if scheme not in SCHEMES:
        _refuse_scheme(text, scheme=scheme, rest=rest)
    example = _EXAMPLES[scheme]
    bare = rest.removesuffix("/")  # without the optional last slash, the URL must not end in a space either
    if re.search("[?#]", rest) or rest != rest.strip() or bare != bare.rstrip() or _BAD_CHARACTER.search(rest):
        _refuse(
            "The URL has a query, a fragment, a space at its end, a control character or a backslash: pass settings in "
            "storage_options, and write a `?` or `#` in the name of a file as %3F or %23.",
            text,
        )
    bucket, _, prefix = bare.partition("/")
    if scheme == "file" and (bucket or not rest):
        _refuse("A file URL names no host: write file:///absolute/path, or the plain path.", text)
    if scheme != "file" and not _BUCKET.fullmatch(bucket):
        _refuse(
            f"The URL must begin with the name of a bucket, container or store: write {example}, and pass credentials, "
            "`endpoint_url` and `account_name` in storage_options or the environment.",
            text,
        )
    if rest.endswith("//") or (prefix and _BAD_PART.search(prefix)):
        _refuse("The URL has an empty, `.` or `..` part: write it with single slashes and no dots.", text)
    if scheme != "file":
        return ParsedUrl(scheme, bucket, prefix)
    try:
        if _BAD_ESCAPE.search(prefix):
            raise ValueError
        return ParsedUrl("file", "", unquote(prefix, errors="strict"))
    except ValueError:
        _refuse("An escape in the URL is none of a path in UTF-8: write the plain path, or %25 for `%`.", text)


def _parse_path(path: str) -> ParsedUrl:
    if "\x00" in path or re.search("[\ud800-\udfff]", path):
        raise InvalidArgumentError("The path contains a NUL, or is not valid Unicode.", path=ascii(path))
    if re.match(r"(?:~|\$(?:[A-Za-z_]\w*|\{\w+\}))(?:/|$)", path):
        # A job would save into a folder named `~`, and `rm -r ~` deletes another one; or into one named `$SCRATCH`.
        raise InvalidArgumentError(
            "`~` and variables are not expanded: pass os.path.expanduser(path) or os.path.expandvars(path).", path=path
        )
    # Not `Path.resolve`, which follows symbolic links and would show the user another path.
    return ParsedUrl("file", "", os.path.abspath(path).lstrip("/"))


def _refuse_scheme(text: str, *, scheme: str, rest: str) -> NoReturn:
    if scheme in _WEB:
        hint = f"Name the bucket, and pass the server as storage_options['endpoint_url']. Write {_KNOWN}."
    elif scheme not in _ALIASES:
        hint = f"Write {_KNOWN}. {_FILE_SYSTEMS}"
    else:
        hint = f"Write {_respelled(scheme, rest)}."
    _refuse(f"Unknown scheme {scheme!r}. {hint}", text)


def _refuse_misspelled(scheme: str, rest: str) -> NoReturn:
    if scheme in _WEB:
        _refuse_scheme(f"{scheme}://{rest}", scheme=scheme, rest=rest)
    raise InvalidArgumentError(
        f"The URL is misspelled: write {_respelled(scheme, rest)} as a str, since pathlib.Path and os.path change "
        "URLs, and pass credentials in storage_options or the environment. If the folder is meant, write ./ before it, "
        "or a file:/// URL."
    )


def _respelled(scheme: str, rest: str) -> str:
    """Return the URL that was meant by a text with this scheme."""
    meant = _MEANT[scheme]
    if meant == "az" and meant != scheme:  # `abfs://container@account.dfs.core.windows.net/x`
        return _EXAMPLES["az"]
    return _shown(f"{meant}:///{rest}" if meant == "file" else f"{meant}://{rest}")


def _refuse(what: str, text: str) -> NoReturn:
    raise InvalidArgumentError(what, url=_shown(text))


def _shown(url: str) -> str:
    """Return a malformed URL without any part that could be a secret (a secret key may contain slashes)."""
    head, mark, rest = url.partition("://")
    if "@" in rest or ":" in rest.partition("/")[0]:
        return f"{head}{mark}…"
    visible = re.split(r"[?#]", rest, maxsplit=1)[0]
    return f"{head}{mark}{visible}" if visible == rest else f"{head}{mark}{visible}?…"
