"""Removal of secrets from texts of clients and servers: keys, signatures of requests, user info of URLs."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Elements of an answer that quotes the request, parameters of a URL, and headers.
_SIGNATURES = (
    re.compile(
        r"(?is)(?P<name><(StringToSign|CanonicalRequest|StringToSignBytes|CanonicalRequestBytes|SignatureProvided|"
        r"AWSAccessKeyId)>).*?(?=</\2>|$)"
    ),
    re.compile(
        r"(?i)(?P<name>(?:x-amz-(?:signature|credential|security-token)[\\\"']*\s*(?:[=:>]|%(?:25)*3[DA]|&#(?:61|58|x3d|x3a);)|"
        r"(?<![a-z])(?:signature|credential|sig)(?:=|%(?:25)*3D|&#(?:61|x3d);))[\s\\\"']*)[^\s\\\"'<>&,;]+"
    ),
)

# A URL or a part of it; the URL of a proxy may contain a user and a password.
_URL = re.compile(r"[^\s'\"<>]+")


def redact(text: str, secrets: Sequence[str]) -> str:
    """Return a text without the given secrets in any encoding, without user info of URLs, and without signatures."""
    # One pattern, the longest first: a key within another one would else leave the rest of the longer one.
    # Those of up to three characters, as tests have, stay: without these letters a message could not be read.
    found = sorted((secret for secret in secrets if secret[3:]), key=len, reverse=True)
    if found:
        text = re.sub("|".join("".join(map(_spellings, secret)) for secret in found), "…", text)
    for signature in _SIGNATURES:
        text = signature.sub(r"\g<name>…", text)
    return _URL.sub(_without_user, text)


def _without_user(url: re.Match[str]) -> str:
    user, at, rest = url[0].rpartition("@")
    return f"…{at}{rest}" if ":" in user else url[0]


def _spellings(char: str) -> str:
    """Return a pattern for a character in a text, in a URL (encoded any number of times), in XML or in JSON."""
    if char.isascii() and char.isalnum():
        return char
    code, itself = ord(char), re.escape(char)
    in_url = "".join(f"%(?:25)*{byte:02x}" for byte in char.encode())
    in_xml = rf"&#(?:{code}|x0*{code:x});|&\w{{2,4}};"
    return rf"(?:\\?{itself}|(?i:{in_url}|{in_xml}|\\u{code:04x}))"
