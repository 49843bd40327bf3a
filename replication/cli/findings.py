"""What ``replication doctor`` finds."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import msgspec

from replication.urls import Url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong: where it is, without the secrets of URLs, what it is, and the cure."""

    where: str
    what: str
    cure: str

    def __post_init__(self) -> None:
        """Hide what may be a secret: the place may be a URL or a path as it is configured."""
        msgspec.structs.force_setattr(self, "where", str(Url(self.where)))

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"{self.where}: {self.what}; cure: {self.cure}"


def together(checks: Iterable[Callable[[], Iterable[T]]]) -> list[T]:
    """Run all ``checks`` at the same time, each in a thread, and return what they find, in their order.

    So many places that send no answer take no longer than one.
    """
    answers = [in_thread(partial(_all, each)) for each in checks]
    return [found for answer in answers for found in answer.result()]


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call ``function`` in a thread, which the end of the command ends, and return its outcome."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome


def _all(check: Callable[[], Iterable[T]]) -> list[T]:
    return [*check()]
