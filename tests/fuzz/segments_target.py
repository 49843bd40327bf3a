"""The file of a segment: lines or, after the magic bytes of gzip or zstd, a packed file."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from contextlib import closing, suppress
from typing import Any, cast

from replication.errors import CatchUpError
from replication.segments.archive import Archive
from replication.segments.compression import decompress
from replication.segments.files import SegmentReader, verify_segment
from replication.segments.manifest import MANIFEST, Manifest, Segment
from replication.session.encoder import encode_facts, encode_gap
from replication.streams.facts import count_rows, texts_of, tokens_of
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.fuzz.folder import MemoryFolder

ORDERS, MASTER, UPTO = StreamName("orders"), InstanceName("master"), Token(10**6)
TOKEN = re.compile(rb"^(?:RDATA orders master|POSITION orders master [0-9]+) ([0-9]{1,8})(?: |$)", re.MULTILINE)
MOST = 2**20  # bytes of lines, more than an input of the runner has unless it is packed
HAS_ZSTD = importlib.util.find_spec("zstandard") is not None


def check(data: bytes) -> None:
    """Read the segment with this file, with a manifest that fits it."""
    compression = (
        "gzip" if data[:2] == b"\x1f\x8b" else "zstd" if HAS_ZSTD and data[:4] == b"\x28\xb5\x2f\xfd" else "none"
    )
    lines = unpack(data, compression)
    segment = describe(data, lines, compression)
    folder: Any = MemoryFolder({segment.name: data})
    fault = verify_segment(folder, segment)
    assert fault is None or fault.startswith(f"/segments/{segment.name}: ")
    if fault is None:
        check_facts(folder, segment, lines)
    folder.files[MANIFEST] = Manifest([segment]).encode()
    archive, after = Archive(folder), Token(0)
    with suppress(CatchUpError):
        while (page := archive.page(ORDERS, MASTER, after=after, upto=UPTO, limit=3)).upto > after:
            grammar.read_rows(texts_of(page.facts))
            assert all(after < token <= page.upto for token in tokens_of(page.facts))
            after = page.upto
    archive.close()


def unpack(data: bytes, compression: str) -> bytes:
    """Return the first MOST bytes of lines, fewer if the file is damaged."""
    found = b""
    with suppress(Exception):
        for chunk in decompress(cast("Any", MemoryFolder({"a": data}).open("a")), compression):
            found += chunk
            if len(found) > MOST:
                break
    return found[:MOST]


def describe(data: bytes, lines: bytes, compression: str) -> Segment:
    """Return the entry of the manifest for these lines."""
    tokens = [each for each in map(int, TOKEN.findall(lines)) if each <= UPTO]
    first, last = (Token(tokens[0]), Token(tokens[-1])) if tokens else (None, None)
    rows = lines.count(b"\nRDATA ") + lines.startswith(b"RDATA ")
    checksum = hashlib.sha256(lines).hexdigest()
    return Segment(ORDERS, MASTER, Token(0), UPTO, rows, first, last, len(lines), checksum, len(data), compression)


def check_facts(folder: Any, segment: Segment, lines: bytes) -> None:
    """Read the facts of a segment without a fault; a master sends the same lines for them."""
    with closing(SegmentReader(folder, segment)) as reader:
        facts = [fact for some in reader.facts() for fact in some]
    assert count_rows(facts) == segment.rows
    grammar.read_rows(texts_of(facts))
    sent = b""
    for fact in facts:
        if fact.texts:
            encoded = encode_facts(ORDERS, MASTER, [fact], after=fact.token, upto=fact.token, line_limit=2 * MOST)
            sent += b"".join(each.data for each in encoded)
        else:
            sent += encode_gap(ORDERS, MASTER, fact.token).data
    if sent != lines:  # a gap has two forms, and only the first one has 2 1
        assert lines == sent.replace(b" 2 1\n", b" 1 1\n", 1)
