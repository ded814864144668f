"""URLs and keys: parse, check and join.

Pure functions on text, except that a relative path is made absolute by the working directory. A URL never contains
credentials, and errors never show a part of a URL that could be a secret.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias, cast
from urllib.parse import quote, unquote

from dcp_remote.errors import InvalidArgumentError

Scheme: TypeAlias = Literal["s3", "gs", "az", "file", "memory"]

SCHEMES: tuple[Scheme, ...] = ("s3", "gs", "az", "file", "memory")

_KNOWN = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///path, memory://name/prefix, or a path"

_FILE_SYSTEMS = "A file system of fsspec is opened by `dcp_remote.storage.open_fsspec_store(filesystem, path)`."

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

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
# `s3:/bucket`, `s3:bucket`, `s3//bucket`: misspelled URLs, which are hardly ever meant as paths.
_NEAR_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)(?P<mark>:/|:|//)(?!/)(?P<rest>.*)", re.DOTALL)

# `/cwd/s3:/bucket/x`, `runs/s3://bucket/x`: a URL that was made a path, as `os.path.abspath` and `os.path.join` do.
# `./s3:/x` and file URLs name such folders.
_URL_IN_PATH = re.compile(r"(?!\./[^/]+:).*?/(?P<url>(?P<scheme>[A-Za-z][A-Za-z0-9]*):/+(?P<rest>[^/].*))", re.DOTALL)
_WEB = ("http", "https")

# `user:password@s3://bucket`, which would otherwise become a local path.
_USER_BEFORE_URL = re.compile(r".*@(?P<url>[A-Za-z][A-Za-z0-9+.-]*://.*)", re.DOTALL)

# `simplecache::s3://bucket/prefix`: a chain of fsspec, which would otherwise become a local path.
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::(?=.*://)", re.DOTALL)

# Permissive, since each store checks its own rules. `$` is for Azure's $root; `:`, `@` and `%` would be user info or an
# escape.
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9$._-]*")

# Objects of a checkpoint or run, whose keys `format/keys.py` makes; a URL pasted from a listing may end in one.
_OWN_OBJECT = re.compile(
    r"(?P<above>.*?)/(?P<key>catalog\.json|manifest\.json|manifests/step-(?P<step>\d{12,})-\d+-[0-9a-f]{16}\.json"
    r"|shards/[0-9a-f]{2}/[^/]+\.safetensors)",
    re.DOTALL,
)

_BAD_PART = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")
# Backslashes are separators in some stores and Windows tools; surrogates cannot be encoded.
_BAD_CHARACTER = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%2[Ff]|%00")


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """URL or path of a store, in parts.

    Attributes:
        scheme: Kind of store.
        bucket: Bucket, container or name of a memory store; empty for files.
        prefix: Prefix of all keys, without slashes at its ends; for files the absolute path without its first slash.
            May be empty.
    """

    scheme: Scheme
    bucket: str
    prefix: str

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

    def child(self, key: str) -> ParsedUrl:
        """Return the URL of `key` below this one.

        Raises:
            InvalidArgumentError: `key` is not a valid key; see `check_key`.
        """
        check_key(key)
        return ParsedUrl(self.scheme, self.bucket, f"{self.prefix}/{key}" if self.prefix else key)


def check_key(key: str) -> None:
    """Check the key of an object, or the prefix of a child store.

    Raises:
        InvalidArgumentError: The key is empty, absolute or ends in a slash, or has empty, `.` or `..` parts, a
            backslash or a control character.
    """
    if _BAD_PART.search(key) or _BAD_CHARACTER.search(key):
        raise InvalidArgumentError(
            "Invalid key: it must be relative, with single slashes between parts other than `.` and `..`, and without "
            "backslashes and control characters.",
            key=key,
        )


def check_list_prefix(prefix: str) -> None:
    """Check a prefix for `list`: any beginning of a key, which may end within a part.

    Raises:
        InvalidArgumentError: No valid key begins with this prefix.
    """
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
    match = _URL.fullmatch(text.strip()) or _NEAR_URL.fullmatch(text) or _URL_IN_PATH.fullmatch(text)
    scheme = match["scheme"].lower() if match is not None else "file"
    return scheme in (*SCHEMES, *_ALIASES) and _ALIASES.get(scheme, scheme) != "file"


def parse_url(url: str | os.PathLike[str]) -> ParsedUrl:
    """Parse the URL or path of a checkpoint or run.

    `s3://`, `gs://`, `az://` and `memory://` URLs are taken literally (not percent-decoded, as in all tools for them);
    `file:///` URLs are percent-decoded (RFC 8089); everything else is a path, which is made absolute now.

    Raises:
        InvalidArgumentError: The URL is invalid; the message says what to write instead.
    """
    given: object = url  # users may pass any type
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str):
        raise InvalidArgumentError(f"The URL must be a str or a path of str. {_FILE_SYSTEMS}", type=type(text).__name__)
    if not text.strip():
        raise InvalidArgumentError(f"The URL is empty. Write {_KNOWN}.")
    if match := _URL.fullmatch(text):
        return _require_no_object(_parse_with_scheme(text, scheme=match["scheme"].lower(), rest=match["rest"]))
    if match := _CHAIN.match(text):
        raise InvalidArgumentError(f"Chains of fsspec are not supported. {_FILE_SYSTEMS}", url=f"{match[0]}…")
    if match := _USER_BEFORE_URL.fullmatch(text):
        _refuse(
            "No user or password before the URL: pass credentials in storage_options or the environment.", match["url"]
        )
    if _URL.match(text.strip()):
        _refuse("The URL has spaces before it.", text.strip())
    if match := _NEAR_URL.fullmatch(text):
        _refuse_near_miss(text, scheme=match["scheme"].lower(), mark=match["mark"], rest=match["rest"])
    if match := _URL_IN_PATH.fullmatch(text):
        _refuse_url_in_path(match["url"], scheme=match["scheme"].lower(), rest=match["rest"])
    return _require_no_object(_parse_path(text))


def _require_no_object(parsed: ParsedUrl) -> ParsedUrl:
    """Refuse the URL of an object of a checkpoint or run; return any other."""
    match = _OWN_OBJECT.fullmatch(f"/{parsed.prefix}")
    if match is None:
        return parsed
    above = ParsedUrl(parsed.scheme, parsed.bucket, match["above"].lstrip("/"))
    what = f"The URL names {match['key']}, an object of a checkpoint or run. Pass the URL above it, {above.canonical}"
    if match["step"]:
        what += f", and step={int(match['step'])} to read that checkpoint"
    raise InvalidArgumentError(f"{what}.", url=parsed.canonical)


def _parse_with_scheme(text: str, *, scheme: str, rest: str) -> ParsedUrl:
    if scheme not in SCHEMES:
        _refuse_scheme(text, scheme=scheme, rest=rest)
    if "?" in rest or "#" in rest:
        _refuse(
            "The URL must have no query and no fragment: pass settings in storage_options"
            + (", and write a `?` or `#` in the name of a file as %3F or %23." if scheme == "file" else "."),
            text,
        )
    bare = rest.removesuffix("/")  # without the optional last slash, the URL must not end in a space either
    if rest != rest.strip() or bare != bare.rstrip() or _BAD_CHARACTER.search(rest):
        _refuse("The URL ends in a space, or contains a control character or a backslash.", text)
    if scheme == "file":
        return _parse_file(text, rest)
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        _refuse(
            "No user, password, account or port in the URL: pass credentials, `endpoint_url` and `account_name` in "
            f"storage_options or the environment. Write {scheme}://bucket/prefix.",
            text,
        )
    if not bucket:
        _refuse(f"The URL names no {_bucket_word(scheme)}. Write {_example(scheme)}.", text)
    if not _BUCKET.fullmatch(bucket):
        _refuse(f"This cannot be the name of a {_bucket_word(scheme)}. Write {_example(scheme)}.", text)
    prefix = prefix.removesuffix("/")
    if prefix and _BAD_PART.search(prefix):
        _refuse("The URL has an empty, `.` or `..` part: write the prefix with single slashes and no dots.", text)
    return ParsedUrl(cast("Scheme", scheme), bucket, prefix)


def _parse_file(text: str, rest: str) -> ParsedUrl:
    if not rest.startswith("/"):
        _refuse("A file URL names no host: write file:///absolute/path, or the plain path.", text)
    if match := _BAD_ESCAPE.search(rest):
        _refuse(f"{match[0]!r} is not an escape that a path can hold: write the plain path, or %25 for `%`.", text)
    prefix = rest[1:].removesuffix("/")
    if prefix and _BAD_PART.search(prefix):
        _refuse("The URL has an empty, `.` or `..` part: write the path with single slashes and no dots.", text)
    try:
        return ParsedUrl("file", "", unquote(prefix, errors="strict"))
    except UnicodeDecodeError:
        _refuse("The escapes in the URL are not UTF-8.", text)


def _parse_path(path: str) -> ParsedUrl:
    if "\x00" in path or re.search("[\ud800-\udfff]", path):
        raise InvalidArgumentError("The path contains a NUL, or is not valid Unicode.", path=ascii(path))
    if path == "~" or path.startswith("~/"):
        # A folder named `~` would be a mistake, and deleting it (`rm -r ~`) a worse one.
        raise InvalidArgumentError("`~` is not expanded: pass os.path.expanduser(path).", path=path)
    if re.match(r"\$(?:[A-Za-z_]\w*|\{\w+\})(?:/|$)", path):
        # Configuration files do not expand variables: the job would save into a folder named `$SCRATCH`.
        raise InvalidArgumentError("Variables are not expanded: pass os.path.expandvars(path).", path=path)
    # Not `Path.resolve`, which follows symbolic links and would show the user another path.
    absolute = os.path.abspath(path)
    return ParsedUrl("file", "", absolute.lstrip("/"))


def _refuse_scheme(text: str, *, scheme: str, rest: str) -> NoReturn:
    if alias := _ALIASES.get(scheme):
        hint = f"Write {_shown(f'{alias}://{rest}')}." if alias != "az" else f"Write {_example('az')}."
    elif scheme in ("http", "https"):
        hint = f"Name the bucket, and pass the server as storage_options['endpoint_url']. Write {_KNOWN}."
    else:
        hint = f"Write {_KNOWN}. {_FILE_SYSTEMS}"
    _refuse(f"Unknown scheme {scheme!r}. {hint}", text)


def _refuse_near_miss(text: str, *, scheme: str, mark: str, rest: str) -> None:
    known = scheme in SCHEMES or scheme in _ALIASES
    if mark != ":/" and not known:
        return  # `run:7/checkpoints` and `out//x` are valid paths
    if not known:
        _refuse(f"Unknown scheme {scheme!r}. Write {_KNOWN}, with ./ before a path that looks like a URL.", text)
    meant = _ALIASES.get(scheme, scheme)
    hint = f"The URL is misspelled: write {_shown(f'{meant}:///{rest}' if meant == 'file' else f'{meant}://{rest}')}."
    if mark == ":/":
        _refuse(f"{hint} pathlib.Path turns `//` into `/`: pass the URL as a str.", text)
    _refuse(f"{hint} If it is a path, write ./ before it.", text)


def _refuse_url_in_path(url: str, *, scheme: str, rest: str) -> None:
    if scheme in _WEB:
        _refuse_scheme(f"{scheme}://{rest}", scheme=scheme, rest=rest)
    if scheme not in (*SCHEMES, *_ALIASES):
        return
    meant = _ALIASES.get(scheme, scheme)
    _refuse(
        f"The path holds a URL, as os.path.abspath and os.path.join make of one: write "
        f"{_shown(f'{meant}:///{rest}' if meant == 'file' else f'{meant}://{rest}')}, and pass it as a str unchanged "
        "(dcp_remote.is_remote tells URLs from paths). If the folder is meant, write it as a file:/// URL.",
        url,
    )


def _bucket_word(scheme: str) -> str:
    return {"az": "container", "memory": "store"}.get(scheme, "bucket")


def _example(scheme: str) -> str:
    return next(example for example in _KNOWN.split(", ") if example.startswith(scheme))


def _refuse(what: str, text: str) -> NoReturn:
    raise InvalidArgumentError(what, url=_shown(text))


def _shown(text: str) -> str:
    """Return a malformed URL without any part that could be a secret (a secret key may contain slashes)."""
    match = _URL.fullmatch(text) or _NEAR_URL.fullmatch(text)
    if match is None:
        return text
    head, rest = text[: match.start("rest")], match["rest"]
    if "@" in rest or ":" in rest.partition("/")[0]:
        return f"{head}…"
    visible = re.split(r"[?#]", rest, maxsplit=1)[0]
    return f"{head}{visible}" if visible == rest else f"{head}{visible}?…"
