"""An answer of HTTP to a worker, and what it means."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

import msgspec

from replication.errors import CatchUpError
from replication.web.pages import read_form

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class NotAllowedError(CatchUpError):
    """Access is refused: a retry is of no use until a secret is corrected."""


class Response(msgspec.Struct, frozen=True):
    """An answer that was received whole; ``hide`` returns a text without the secret."""

    url: str
    code: int
    location: str
    body: bytes
    hide: Callable[[str], str]

    def error(self) -> CatchUpError:
        """Return an error with the URL, the status, the reason and the cure."""
        kind = NotAllowedError if self.code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN} else CatchUpError
        return kind(f"{self.url}: HTTP {self.code}: {self._meaning()}")

    def _meaning(self) -> str:
        match self.code, self.decoded():
            case 401, _:
                return "the secret is missing or wrong; both sides must be given the same --secret-file"
            case ((301 | 302 | 303 | 307 | 308), _):
                return f"redirects to {self.hide(self.location)!r:.200}; give the address that answers directly"
            case 500, {"errcode": _}:
                return "an error in that Synapse, or a missing or wrong secret: Synapse answers both alike"
            case _, {"detail": str(text)} | {"error": str(text)}:
                return self.hide(text)[:500]
        return f"not an answer of this API: {self.hide(repr(self.body))[:100]}"

    def decoded(self) -> dict[str, object]:
        """Return the body if it is a JSON object, else an empty dict."""
        try:
            return read_form(self.body, dict[str, object], "an object")
        except CatchUpError:
            return {}

    def read(self, form: type[T], what: str) -> T:
        """Return the body in a form of msgspec; CatchUpError names the URL, and ``what`` it should be."""
        try:
            return read_form(self.body, form, what)
        except CatchUpError as error:
            raise CatchUpError(f"{self.url}: {error}") from error

    def is_unknown_path(self) -> bool:
        """Return whether the server does not have the path: errors of this package's API have a ``detail``."""
        if self.code in {404, 405}:
            return "detail" not in self.decoded()
        return self.code == HTTPStatus.BAD_REQUEST and self.decoded().get("errcode") == "M_UNRECOGNIZED"
