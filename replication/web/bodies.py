"""The bound of all bodies that requests of HTTP keep (docs/security.md, Bounds)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from replication.web.request import ApiRequest

MOST_BODIES: Final = 268_435_456  # bytes; four bodies of MAX_BODY
SMALL_BODY: Final = 16_384  # bytes; a smaller body does not count


class Bodies:
    """The bodies that requests keep: MOST_BODIES bytes of all connections together.

    Beyond that, the largest one that has not arrived as a whole is refused.  So one that is small is not.
    """

    def __init__(self) -> None:
        self._sizes: dict[ApiRequest, int] = {}
        self.total = self.refused = 0

    def keep(self, request: ApiRequest, size: int) -> None:
        """Note that ``request`` keeps ``size`` bytes now."""
        self.total -= self._sizes.pop(request, 0)
        if size >= SMALL_BODY:
            self._sizes[request] = size
            self.total += size
        while self.total > MOST_BODIES and (arriving := [each for each in self._sizes if each.arrives]):
            self.refused += 1
            text = f"requests of all clients have bodies of more than {MOST_BODIES} bytes, and this one is the largest"
            max(arriving, key=self._sizes.__getitem__).refuse_body(text)
