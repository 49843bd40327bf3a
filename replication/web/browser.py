"""The calls of a browser, which import the live page at first use (docs/http.md, The live page)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replication.web.request import Answer, ApiRequest


async def show_page(request: ApiRequest) -> Answer:
    """Answer with the page."""
    from replication.web.live import calls  # noqa: PLC0415  (a process without viewers does not need it)

    return await calls.show_page(request)


async def send_events(request: ApiRequest) -> Answer:
    """Answer with server-sent events."""
    from replication.web.live import calls  # noqa: PLC0415

    return await calls.send_events(request)


async def send_file(request: ApiRequest, name: str) -> Answer:
    """Answer with the style or the script of the page."""
    from replication.web.live import calls  # noqa: PLC0415

    return await calls.send_file(request, name)
