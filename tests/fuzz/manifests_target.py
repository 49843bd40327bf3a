"""The JSON files of a segments folder: the manifest, the histories, and the receipts of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from replication.errors import CatchUpError, ConfigError, StoreError
from replication.segments.archive import Archive
from replication.segments.files import verify
from replication.segments.histories import HISTORIES, stored_histories
from replication.segments.manifest import MANIFEST, NOT_AN_ENTRY, Manifest, read_manifest, read_manifest_to_extend
from replication.segments.run import read_receipt
from replication.wire.grammar import Token
from tests.fuzz.folder import MemoryFolder


def check(data: bytes) -> None:
    """Read ``data`` as each of the files."""
    folder: Any = MemoryFolder({MANIFEST: data, HISTORIES: data})
    with suppress(StoreError):
        for history in stored_histories(folder, Manifest()).values():
            assert all(each.name is not None and each.settled + each.start is not None for each in history)
    with suppress(StoreError):
        read_manifest_to_extend(folder)
    with suppress(*NOT_AN_ENTRY):
        assert all(isinstance(each.upto, int) for each in read_receipt(data))
    try:
        manifest = read_manifest(folder)
    except CatchUpError as error:
        assert str(error).startswith(f"/segments/{MANIFEST}: ")
        return
    assert manifest is not None
    check_manifest(folder, manifest)


def check_manifest(folder: Any, manifest: Manifest) -> None:
    """Use a manifest as a worker and a replay do; the folder has none of its files."""
    assert all(isinstance(each, str) for each in manifest.faults())
    assert sum(each.rows for each in manifest.summary("/segments")) == sum(each.rows for each in manifest.segments)
    for each in manifest.segments:
        path = PurePosixPath(each.name)
        assert ".." not in path.parts
        assert not path.is_absolute()
    again: Any = MemoryFolder({MANIFEST: manifest.encode()})
    assert read_manifest(again) == manifest
    with suppress(ConfigError):  # an unknown compression
        assert sum(1 for segment, fault in verify(folder) if segment and fault) == len(manifest.segments)
    archive = Archive(folder)
    for stream, writer in manifest.chains():
        with suppress(CatchUpError):
            archive.page(stream, writer, after=Token(0), upto=Token(5), limit=10)
    archive.close()
