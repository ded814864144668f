"""Operations of S3, as far as clients that save and load checkpoints ask for them.

Bodies go into the file before the objects know of them, so what is cut off in the middle, or refused, leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET

from tests.benchmark.server.body import Body
from tests.benchmark.server.checksums import Digest, require_checksums, told_checksums
from tests.benchmark.server.objects import Object, Objects, Part, Piece, Upload
from tests.benchmark.server.reply import Reply, document, iso, leaf, tag
from tests.benchmark.server.request import Request, S3Error, asked_range
from tests.benchmark.server.space import NoRoomError, Space

# S3's own limits, of one request.
_DELETE_KEYS_MAX = 1_000
_PARTS_MAX = 10_000


class Operations:
    """Operations, by name; the connection brings its body in, and takes its answer out."""

    def __init__(self, space: Space, objects: Objects, *, digests: Mapping[str, Digest]) -> None:
        self._space = space
        self._objects = objects
        self._digests = digests
        self._by_name: Mapping[str, Callable[[Request, Body], Reply]] = {
            "CreateBucket": self._create_bucket,
            "HeadBucket": self._head_bucket,
            "GetBucketLocation": self._get_bucket_location,
            "ListObjectsV2": self._list_objects,
            "DeleteObjects": self._delete_objects,
            "PutObject": self._put_object,
            "CopyObject": self._copy_object,
            "GetObject": self._get_object,
            "HeadObject": self._get_object,  # its body stays here
            "DeleteObject": self._delete_object,
            "CreateMultipartUpload": self._create_multipart_upload,
            "UploadPart": self._upload_part,
            "CompleteMultipartUpload": self._complete_multipart_upload,
            "AbortMultipartUpload": self._abort_multipart_upload,
        }

    def carry_out(self, operation: str, request: Request, body: Body) -> Reply:
        act = self._by_name.get(operation)
        if act is None:
            asked = f"{request.method} {request.path} {sorted(request.query)}"
            raise S3Error(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", f"This server knows no {asked}.")
        return act(request, body)

    def _create_bucket(self, request: Request, body: Body) -> Reply:
        body.read_document()
        self._objects.create_bucket(request.bucket)
        return Reply(headers={"Location": f"/{request.bucket}"})

    def _head_bucket(self, request: Request, body: Body) -> Reply:
        self._objects.require_bucket(request.bucket)
        return Reply(headers={"x-amz-bucket-region": "us-east-1"})

    def _get_bucket_location(self, request: Request, body: Body) -> Reply:
        self._objects.require_bucket(request.bucket)
        return document("LocationConstraint")

    def _list_objects(self, request: Request, body: Body) -> Reply:
        query = request.query
        prefix, delimiter, after = (query.get(name, "") for name in ("prefix", "delimiter", "start-after"))
        found, prefixes = self._objects.listed(request.bucket, prefix=prefix, delimiter=delimiter, after=after)

        def shown(text: str) -> str:
            return quote(text) if query.get("encoding-type") == "url" else text

        inside = [leaf("Name", request.bucket), leaf("Prefix", shown(prefix))]
        inside += [leaf("Delimiter", shown(delimiter))] if delimiter else []
        inside += [leaf("EncodingType", "url")] if query.get("encoding-type") == "url" else []
        # All of them, also more than the thousand of S3's own pages.
        inside += [leaf("KeyCount", len(found) + len(prefixes)), leaf("IsTruncated", "false")]
        for key, there in found:
            named = (leaf("Key", shown(key)), leaf("LastModified", iso(there.modified_seconds)))
            told = (leaf("ETag", f'"{there.etag}"'), leaf("Size", there.size_bytes))
            inside.append(tag("Contents", *named, *told, leaf("StorageClass", "STANDARD")))
        inside += [tag("CommonPrefixes", leaf("Prefix", shown(common))) for common in prefixes]
        return document("ListBucketResult", *inside)

    def _delete_objects(self, request: Request, body: Body) -> Reply:
        self._objects.require_bucket(request.bucket)
        sent = body.read_document()
        self._checksums(request, body, memoryview(sent))
        asked = _xml_elements(sent)
        keys = [element.text or "" for element in asked.findall("{*}Object/{*}Key")]
        if not 0 < len(keys) <= _DELETE_KEYS_MAX:
            raise S3Error(HTTPStatus.BAD_REQUEST, "MalformedXML", f"From 1 to {_DELETE_KEYS_MAX} keys.")
        self._objects.delete(request.bucket, keys)
        quiet = asked.findtext("{*}Quiet") == "true"
        return document("DeleteResult", *(tag("Deleted", leaf("Key", key)) for key in keys if not quiet))

    def _put_object(self, request: Request, body: Body) -> Reply:
        self._objects.require_bucket(request.bucket)
        piece, etag, checksums = self._receive(request, body)
        new = Object((piece,), etag, 0.0, checksums)
        try:
            self._objects.put(request.bucket, request.key, new, request.conditions)
        except BaseException:
            self._space.drop(piece.extent)
            raise
        told = {f"x-amz-checksum-{name}": value for name, value in checksums.items()}
        return Reply(headers={"ETag": f'"{etag}"', **told})

    def _receive(self, request: Request, body: Body) -> tuple[Piece, str, dict[str, str]]:
        """A body into the file; its ETag, and the checksums that came with it."""
        size_bytes = body.require_size()
        try:
            extent = self._space.take(size_bytes)
        except NoRoomError as error:
            # Not a 5xx, which clients would try again.
            raise S3Error(HTTPStatus.BAD_REQUEST, "InsufficientStorage", str(error)) from error
        try:
            view = self._space.view[extent.start : extent.start + size_bytes]
            body.read_into(view)
            checksums = self._checksums(request, body, view)
        except BaseException:
            self._space.drop(extent)
            raise
        return Piece(extent, size_bytes), self._objects.new_etag(), checksums

    def _checksums(self, request: Request, body: Body, view: memoryview) -> dict[str, str]:
        """The checksums of a request, head and trailers; compared with its body if the server verifies."""
        told = {**request.headers, **body.finish()}
        if self._digests:
            require_checksums(told, view, self._digests)
        return told_checksums(told)

    def _copy_object(self, request: Request, body: Body) -> Reply:
        source = unquote(request.headers["x-amz-copy-source"].partition("?")[0]).removeprefix("/")
        bucket, _, key = source.partition("/")
        there = self._objects.get(bucket, key)
        try:
            copy = replace(there, etag=self._objects.new_etag())
            copy = self._objects.put(request.bucket, request.key, copy, request.conditions)
        except BaseException:
            self._objects.release(there.pieces)
            raise
        modified = leaf("LastModified", iso(copy.modified_seconds))
        return document("CopyObjectResult", modified, leaf("ETag", f'"{copy.etag}"'))

    def _get_object(self, request: Request, body: Body) -> Reply:
        there = self._objects.get(request.bucket, request.key)
        try:
            request.conditions.require_for_get(there.etag)
            size_bytes = there.size_bytes
            headers = {
                "Content-Type": "binary/octet-stream",
                "Accept-Ranges": "bytes",
                "ETag": f'"{there.etag}"',
                "Last-Modified": formatdate(there.modified_seconds, usegmt=True),
            }
            part = self._asked_part(request, there)
            if part is not None:
                headers["x-amz-mp-parts-count"] = str(len(there.pieces))
            asked = part if part is not None else asked_range(request.headers.get("range"), size_bytes)
            if asked is None or not size_bytes:
                if request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED" and part is None:
                    headers |= {f"x-amz-checksum-{name}": value for name, value in there.checksums.items()}
                return Reply(HTTPStatus.OK, headers, content=there, size_bytes=size_bytes)
            headers["Content-Range"] = f"bytes {asked.start}-{asked.stop - 1}/{size_bytes}"
            return Reply(
                HTTPStatus.PARTIAL_CONTENT,
                headers,
                content=there,
                start=asked.start,
                size_bytes=asked.stop - asked.start,
            )
        except BaseException:
            self._objects.release(there.pieces)
            raise

    def _asked_part(self, request: Request, there: Object) -> range | None:
        """Answer with one part of an object that came in parts; so AWS's own runtime learns how large parts are."""
        asked = request.query.get("partNumber")
        if asked is None:
            return None
        if not asked.isdecimal() or not 0 < int(asked) <= len(there.pieces):
            raise S3Error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidPartNumber", "There is no such part.")
        sizes = [piece.size_bytes for piece in there.pieces]
        start = sum(sizes[: int(asked) - 1])
        return range(start, start + sizes[int(asked) - 1])

    def _delete_object(self, request: Request, body: Body) -> Reply:
        self._objects.delete(request.bucket, [request.key])
        return Reply(HTTPStatus.NO_CONTENT)

    def _create_multipart_upload(self, request: Request, body: Body) -> Reply:
        upload_id = self._objects.create_upload(Upload(request.bucket, request.key))
        named = (leaf("Bucket", request.bucket), leaf("Key", request.key), leaf("UploadId", upload_id))
        return document("InitiateMultipartUploadResult", *named)

    def _upload_part(self, request: Request, body: Body) -> Reply:
        upload_id, asked = request.query["uploadId"], request.query.get("partNumber", "")
        if not asked.isdecimal() or not 0 < int(asked) <= _PARTS_MAX:
            raise S3Error(HTTPStatus.BAD_REQUEST, "InvalidArgument", f"Parts have numbers from 1 to {_PARTS_MAX}.")
        self._objects.require_upload(request.bucket, request.key, upload_id)
        piece, etag, checksums = self._receive(request, body)
        try:
            self._objects.put_part(request.bucket, request.key, upload_id, int(asked), Part(piece, etag))
        except BaseException:
            self._space.drop(piece.extent)
            raise
        told = {f"x-amz-checksum-{name}": value for name, value in checksums.items()}
        return Reply(headers={"ETag": f'"{etag}"', **told})

    def _complete_multipart_upload(self, request: Request, body: Body) -> Reply:
        sent = body.read_document()
        body.finish()  # the checksums in the head are of the whole object, which came in parts
        wanted = []
        for element in _xml_elements(sent).findall("{*}Part"):
            number, etag = element.findtext("{*}PartNumber", ""), element.findtext("{*}ETag", "")
            if not number.isdecimal():
                raise S3Error(HTTPStatus.BAD_REQUEST, "MalformedXML", "PartNumber")
            wanted.append((int(number), etag.strip().strip('"')))

        new = self._objects.complete(request.bucket, request.key, request.query["uploadId"], wanted, request.conditions)
        named = (leaf("Bucket", request.bucket), leaf("Key", request.key), leaf("ETag", f'"{new.etag}"'))
        return document("CompleteMultipartUploadResult", leaf("Location", request.path), *named)

    def _abort_multipart_upload(self, request: Request, body: Body) -> Reply:
        self._objects.abort(request.bucket, request.key, request.query["uploadId"])
        return Reply(HTTPStatus.NO_CONTENT)


def _xml_elements(body: bytes) -> ET.Element:
    try:
        return ET.fromstring(body)  # it comes from this machine, and expat knows the old attacks
    except ET.ParseError as error:
        raise S3Error(HTTPStatus.BAD_REQUEST, "MalformedXML", str(error)) from error
