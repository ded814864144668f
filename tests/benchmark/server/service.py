"""State that all connections share: the file, the objects, the shape, the counts; and requests to the server itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from tests.benchmark.server.checksums import load_digests
from tests.benchmark.server.counts import Counter
from tests.benchmark.server.objects import Objects
from tests.benchmark.server.operations import Operations
from tests.benchmark.server.shape import Shape, SlowDowns
from tests.benchmark.server.space import Space


class Service:
    """One store, as it behaves at the moment."""

    def __init__(self, *, folder: Path, size_bytes: int, verify: bool, buckets: Iterable[str], shape: Shape) -> None:
        digests = load_digests() if verify else {}
        self.space = Space(folder, size_bytes)
        self.objects = Objects(self.space, buckets=buckets)
        self.operations = Operations(self.space, self.objects, digests=digests)
        self.shape = (shape, SlowDowns(shape))
        # Last: what it took to start is nobody's request.
        self.counter = Counter()

    def administer(self, asked: str, document: bytes) -> Mapping[str, object]:
        """Answer a request below `/-/`."""
        match asked:
            case "GET /-/counts":
                return asdict(self.counter.counts())
            case "POST /-/reset":
                self.counter.reset()
            case "POST /-/clear":
                self.objects.clear()
            case "POST /-/shape":
                shape = Shape(**json.loads(document))
                self.shape = (shape, SlowDowns(shape))
            case _:
                raise AssertionError(asked)
        return {}
