"""URLs and keys: valid ones, the advice for invalid ones, and secrets that are never shown."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.keys import manifest_key, origin
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.shard import ShardNames
from dcp_remote.storage.url import ParsedUrl, check_key, check_list_prefix, is_remote, parse_url


@pytest.mark.parametrize(
    ("url", "expected", "canonical"),
    [
        ("s3://bucket/a/b", ParsedUrl("s3", "bucket", "a/b"), "s3://bucket/a/b"),
        ("s3://bucket/", ParsedUrl("s3", "bucket", ""), "s3://bucket"),
        ("S3://bucket/A/", ParsedUrl("s3", "bucket", "A"), "s3://bucket/A"),
        ("s3://bucket/a%20b/ä@x:y", ParsedUrl("s3", "bucket", "a%20b/ä@x:y"), "s3://bucket/a%20b/ä@x:y"),
        ("gs://my_bucket.org/x", ParsedUrl("gs", "my_bucket.org", "x"), "gs://my_bucket.org/x"),
        ("az://$root/x", ParsedUrl("az", "$root", "x"), "az://$root/x"),
        ("memory://name/x/y", ParsedUrl("memory", "name", "x/y"), "memory://name/x/y"),
        ("file:///a/b%20c/%3F%23%25/", ParsedUrl("file", "", "a/b c/?#%"), "file:///a/b%20c/%3F%23%25"),
        ("file:///cwd/s3:/bucket/x", ParsedUrl("file", "", "cwd/s3:/bucket/x"), "file:///cwd/s3%3A/bucket/x"),
        ("/a/b%20c?", ParsedUrl("file", "", "a/b%20c?"), "file:///a/b%2520c%3F"),
        ("/a//b/../c/", ParsedUrl("file", "", "a/c"), "file:///a/c"),
        ("//a", ParsedUrl("file", "", "a"), "file:///a"),
        ("/", ParsedUrl("file", "", ""), "file:///"),
        (Path("/a/b"), ParsedUrl("file", "", "a/b"), "file:///a/b"),
    ],
)
def test_valid_urls(url: str | Path, expected: ParsedUrl, canonical: str) -> None:
    """Parse each form into its parts and its canonical spelling."""
    assert parse_url(url) == expected
    assert expected.canonical == canonical
    assert parse_url(canonical) == expected


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse relative paths, also those that look a little like URLs: made absolute at once."""
    monkeypatch.chdir(tmp_path)
    like_urls = ("./s3:/bucket", "a/run:/x", "a/s3:", "a/s3:b")
    for path in ("run", "./run", "./$x", "$5.00", "run:7/x", "a//b", "~x", "s3/bucket", *like_urls):
        assert parse_url(path).path == str(tmp_path / PurePosixPath(path))
    assert parse_url("../x").path == str(tmp_path.parent / "x")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("", "The URL is empty"),
        ("hdfs://host/x", "Unknown scheme 'hdfs'. Write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix"),
        ("gcs://bucket/x", "Write gs://bucket/x."),
        ("s3a://bucket/x", "Write s3://bucket/x."),
        ("abfs://container@account.dfs.core.windows.net/x", "Write az://container/prefix."),
        ("https://bucket.s3.amazonaws.com/x", "storage_options['endpoint_url']"),
        ("s3:/bucket/x", "misspelled: write s3://bucket/x as a str"),
        (Path("s3://bucket/x"), "misspelled: write s3://bucket/x as a str"),
        (Path("hdfs://bucket/x"), "no URL that can be opened. Write s3://bucket/prefix"),
        ("s3:bucket/x", "If the folder is meant, write ./ before it"),
        ("/cwd/s3:/bucket/x", "write s3://bucket/x as a str"),
        ("./runs/s3:/bucket", "write s3://bucket as a str"),
        ("/cwd/file:/a/b", "write file:///a/b "),
        ("file:/a/b", "misspelled: write file:///a/b "),
        (" s3://bucket/x", "misspelled: write s3://bucket/x "),
        ("s3://bucket/x ", "a space at its end"),
        ("s3://bucket/x\n", "control character"),
        ("s3://", "name of a bucket, container or store: write s3://bucket/prefix"),
        ("s3:///x", "write s3://bucket/prefix"),
        ("memory://", "write memory://name/prefix"),
        ("s3://buc ket/x", "must begin with the name of a bucket"),
        ("s3://bucket//x", "empty, `.` or `..` part"),
        ("s3://bucket/../x", "empty, `.` or `..` part"),
        ("s3://bucket/a\\b", "backslash"),
        ("s3://bucket/x?versionId=1", "a query, a fragment"),
        ("s3://bucket/x#1", "a query, a fragment"),
        ("s3://bucket:9000/x", "credentials, `endpoint_url` and `account_name` in storage_options"),
        ("me:hunt/er2@s3://bucket/x", "write s3://bucket/x as a str"),
        ("me:hunter2@s3a://bucket/x", "credentials in storage_options or the environment"),
        ("file://host/x", "names no host: write file:///absolute/path"),
        ("file:///a?b", "%3F or %23"),
        ("file:///a/../b", "empty, `.` or `..` part"),
        ("file:///a%2Fb", "An escape in the URL"),
        ("file:///100%", "%25 for `%`"),
        ("file:///%ff", "UTF-8"),
        ("a\0b", "NUL"),
        ("a\udcffb", "not valid Unicode"),
        ("simplecache::s3://bucket/run", "open_fsspec_store"),
        ("zip://a::s3://user:pw@bucket/b", "open_fsspec_store"),
        ("~/x", "os.path.expanduser"),
        ("$SCRATCH/x", "os.path.expandvars"),
    ],
)
def test_invalid_urls(url: str | Path, advice: str) -> None:
    """Make each mistake; the message says what to write instead."""
    with pytest.raises(InvalidArgumentError) as caught:
        parse_url(url)
    assert advice in str(caught.value)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("above", ["s3://bucket", "s3://bucket/a/run", "memory://name", "file:///tmp/run"])
def test_urls_of_objects_of_a_run(above: str) -> None:
    """Paste the URL of an object that a save makes: refused, with the URL above it."""
    keys = [CATALOG_KEY, MANIFEST_KEY, manifest_key(revision=3, step=12)]
    keys += [ShardNames(5, prefix).key(0) for prefix in ("", origin(revision=3, step=12))]
    for key in keys:
        with pytest.raises(InvalidArgumentError) as caught:
            parse_url(f"{above}/{key}")
        assert caught.value.what.endswith(f"an object of a checkpoint or run. Pass the URL above it, {above}.")
    for name in ("catalog.json.bak", "manifests", "shards", "my-manifest.json", "manifests/step-12.json"):
        parse_url(f"{above}/{name}")


REMOTE: list[object] = [
    *("s3://bucket/x", "S3://bucket", "gs://bucket", "az://container/x", "memory://name", Path("s3://bucket/x")),
    *("s3a://bucket/x", "gcs://bucket", "abfs://container@account.dfs.core.windows.net/x", "s3://"),
    *("s3:/bucket/x", "/cwd/s3:/bucket/x", "runs/s3://bucket/x", " s3://bucket/x", "s3://user:secret@bucket/x"),
]
NOT_REMOTE: list[object] = [
    *("", "run", "/a/b", "./s3:/bucket", "s3/bucket", "run:7/x", "~/x", Path("/a"), "file:///a", "file:/a"),
    *("/x/file:/a", "local:///a", "hf://org/name", "https://host/x", "a/run:/x"),
    *(b"s3://bucket/x", None, 3, ["s3://bucket"]),
]


def test_remote_urls() -> None:
    """Ask for URLs of object storage, also for refused ones, and for paths, other URLs and values of other types."""
    assert [url for url in REMOTE if not is_remote(url)] == []
    assert [url for url in NOT_REMOTE if is_remote(url)] == []


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:HUNTER2@bucket/x",
        "s3://AKIA:HUN/TER2@bucket/x",
        "s3://AKIA:HUNTER2/bucket",
        "s3://AKIA:HUN?TER2@bucket/x",
        "s3://bucket/x?X-Amz-Signature=HUNTER2",
        "s3://bucket/x?sig=a@HUNTER2",
        "s3://bucket/x#HUNTER2",
        "https://me:HUNTER2@host/x?sig=HUNTER2",
        "gcs://me:HUNTER2@bucket/x",
        "s3:/me:HUNTER2@bucket/x",
        "/cwd/s3:/me:HUNTER2@bucket/x",
        "/cwd/https:/me:HUNTER2@host/x",
        "s3//me:HUNTER2@bucket/x",
        "gcs:me:HUNTER2@bucket/x",
        " s3://me:HUNTER2@bucket/x",
        "s3://me:HUNTER2@bucket/x\n",
        "file://me:HUNTER2@host/x",
        "az://container/x?sv=1&sig=HUNTER2",
    ],
)
def test_secrets_are_not_shown(url: str) -> None:
    """Put a secret wherever users put one: refused, and no part of it is in the error."""
    with pytest.raises(InvalidArgumentError) as caught:
        parse_url(url)
    assert not any(part in str(caught.value) for part in ("HUN", "TER2"))


_PARTS = st.text(st.characters(exclude_characters="/\\\x7f", exclude_categories=("Cc", "Cs")), min_size=1).filter(
    lambda part: part not in (".", "..")
)


@given(parts=st.lists(_PARTS, min_size=1, max_size=4))
def test_paths_survive_their_canonical_form(parts: list[str]) -> None:
    """Convert any absolute path to a URL and back."""
    parsed = parse_url("/" + "/".join(parts))
    assert parsed.path == "/" + "/".join(parts)
    assert parse_url(parsed.canonical) == parsed
    assert parsed.canonical.isascii()


@given(parts=st.lists(_PARTS, min_size=1, max_size=4))
def test_keys(parts: list[str]) -> None:
    """Check keys of valid parts, and the same with any one part made invalid."""
    check_key("/".join(parts))
    check_list_prefix("/".join(parts))
    check_list_prefix("/".join(parts) + "/")
    assert ParsedUrl("s3", "b", "p").child("/".join(parts)).prefix == "/".join(["p", *parts])
    for index in range(len(parts)):
        for bad in ("", ".", "..", "a\0", "a\\b", "\udcff"):
            with pytest.raises(InvalidArgumentError):
                check_key("/".join([*parts[:index], bad, *parts[index + 1 :]]))


def test_prefixes_and_children() -> None:
    """Check beginnings of keys, wherever they end, and keys below a bucket and a path; none leads out."""
    for prefix in ("", "a", "a/", "a/.", "a/b-", "..."):
        check_list_prefix(prefix)
    for prefix in ("/", "/a", "a//", "../", "../a", "a/../b", "a\\", "a\0"):
        with pytest.raises(InvalidArgumentError):
            check_list_prefix(prefix)
    assert ParsedUrl("s3", "b", "").child("k/x").canonical == "s3://b/k/x"
    assert ParsedUrl("file", "", "a b").child("k").canonical == "file:///a%20b/k"
    with pytest.raises(InvalidArgumentError):
        ParsedUrl("s3", "b", "p").child("../x")
    for wrong in (b"/x", LocalFileSystem()):
        with pytest.raises(InvalidArgumentError, match=r"must be a str.*open_fsspec_store"):
            parse_url(wrong)  # type: ignore[arg-type]  # the mistake that is tested
