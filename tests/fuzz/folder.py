"""A segments folder in memory."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from typing import BinaryIO


@attrs.define
class MemoryFolder:
    """Files by name; the part of ``LocalFolder`` that readers use."""

    files: dict[str, bytes]
    url: str = "/segments"

    def open(self, name: str) -> BinaryIO:
        if name not in self.files:
            raise FileNotFoundError(2, "No such file or directory")
        return BytesIO(self.files[name])

    def size(self, name: str) -> int | None:
        return len(self.files[name]) if name in self.files else None

    def stamp(self, name: str) -> Any:
        return self.files.get(name)

    def stamp_of(self, _source: BinaryIO, name: str) -> Any:
        return self.stamp(name)
