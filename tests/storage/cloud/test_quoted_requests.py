"""Stores whose errors quote the request: what signed it is in no error, no chain of errors, and no log of ours."""

from __future__ import annotations

import html
import json
import logging
import pickle
import re
import traceback
from collections.abc import Callable
from urllib.parse import quote, unquote

import pytest

from dcp_remote.common.deadline import RetryPolicy
from dcp_remote.errors import DcpRemoteError
from dcp_remote.storage.cloud.redaction import redact
from dcp_remote.storage.cloud.store import open_cloud_store
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.url import parse_url
from tests.support.clocks import SleepClock
from tests.support.clouds import VERBS
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "IQoJb3JpZ2luX2Vj//a-session+token_of/many&chars=="
ACCESS = "AKIAIOSFODNN7EXAMPLE"


def _xml(text: str) -> str:
    return f"<Error><Code>InternalError</Code><Message>We failed: {text}</Message><Resource>{text}</Resource></Error>"


# Ways to quote a target and headers in a page.
PAGES: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "xml": lambda text: _xml(html.escape(text)),
    "xml with numbers": lambda text: _xml(re.sub(r"\W", lambda found: f"&#{ord(found[0])};", text)),
    "xml with hex numbers": lambda text: _xml(re.sub(r"[^\w.-]", lambda found: f"&#x{ord(found[0]):X};", text)),
    "unescaped xml": _xml,
    "in a URL": lambda text: f"<a href='/login?next={quote(text, safe='')}'>login</a>",
    "in a URL, small": lambda text: re.sub(r"%..", lambda found: found[0].lower(), quote(text, safe="")),
    "twice in a URL": lambda text: quote(quote(text, safe=""), safe=""),
    "json": lambda text: json.dumps({"error": text, "of": {"target": text}}),
    "json with slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "canonical": lambda text: f"<CanonicalRequest>{html.escape(text)}</CanonicalRequest><StringToSign>AWS4\n0123",
}


def get_signing_texts(request: HttpRequest) -> set[str]:
    """Return the texts that sign a request: its signature and the keys."""
    where = unquote(request.path) + request.headers.get("authorization", "")
    return {SECRET, TOKEN, ACCESS, *re.findall(r"Signature=(\w+)", where)}


def decode_all(shown: str) -> str:
    """Return a text together with all its decodings."""
    found = [shown]
    for _ in range(3):
        found += [html.unescape(found[-1]), unquote(found[-1]), found[-1].replace("\\/", "/")]
        found.append(unquote(html.unescape(found[-1])))
    return "\n".join(found)


# Parts of a request that a page quotes, each by itself, since redacting one secret might hide another.
PIECES: dict[str, Callable[[HttpRequest], str]] = {
    "target": lambda request: request.path,
    "token": lambda request: f"x-amz-security-token: {request.headers.get('x-amz-security-token')}",
    "bare token": lambda request: f"token {request.headers.get('x-amz-security-token')}",
    "authorization": lambda request: f"authorization: {request.headers.get('authorization')}",
}


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_quotes_the_request(
    page: str, piece: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail every verb with a page that quotes the request: errors and logs show nothing that signs it."""
    secrets: set[str] = set()

    def answer(request: HttpRequest) -> HttpAnswer:
        secrets.update(get_signing_texts(request))
        return HttpAnswer(500, PAGES[page](PIECES[piece](request)).encode())

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    with scripted_server(answer) as server, caplog.at_level(logging.DEBUG, "dcp_remote"):
        store = open_cloud_store(
            parse_url("s3://bucket/run"), {"region": "us-east-1", "endpoint_url": server.endpoint_url}
        )
        shown = ""
        for send in (send for verb, send in VERBS.items() if verb != "delete"):
            # After two attempts, less than the first delay is left.
            clock, policy = SleepClock(), RetryPolicy(first_delay_seconds=40, delay_seconds_max=40)
            retrying = RetryingStore(store, clock.deadline(60, share=0.999), policy)
            with pytest.raises(DcpRemoteError) as info:
                send(retrying)
            copy = pickle.loads(pickle.dumps(info.value))
            shown += "".join(traceback.format_exception(info.value)) + "".join(traceback.format_exception(copy))
            shown += repr(info.value) + repr(copy.details)
        shown += "".join(record.getMessage() for record in caplog.records if record.name.startswith("dcp_remote"))
    assert len(secrets) > 6
    readable = decode_all(shown)
    assert [secret for secret in secrets if secret in readable] == []


def test_harmless_texts_are_kept() -> None:
    """Redact texts without secrets: words of the store's errors, addresses, and parameters that sign nothing."""
    for text in (
        "The request signature we calculated does not match the signature you provided. Check your key.",
        "Error performing GET http://host:9000/bucket?list-type=2&prefix=run%2F in 1ms - 503: <Code>SlowDown</Code>",
        "Credential should be scoped to a valid region",
    ):
        assert redact(text, [SECRET, TOKEN]) == text


def test_a_secret_that_contains_the_key() -> None:
    """The key `minio` and the secret `minio-secret`, also encoded, in either order."""
    for secrets in (["minio", "minio-secret"], ["minio-secret", "minio"]):
        assert redact("minio-secret, minio%2Dsecret and minio", secrets) == "…, … and …"


def test_a_secret_of_few_letters_is_kept() -> None:
    """A test's secret of up to three letters would take these out of each word of the message."""
    assert redact("a bucket of abcd", ["a", "abc", "abcd"]) == "a bucket of …"
