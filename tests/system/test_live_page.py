"""The live page in a real Chromium: moving facts, a stream that is mended from the page alone, and accessibility.

The pictures of the page are kept in ``build/pictures``, to be looked at.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.request import Request, urlopen

import pytest

from tests.system.daemons import CHECKOUT, LOCAL, Daemon, append
from tests.system.test_skips import APP, HTTP, follow, order

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PICTURES: Final = CHECKOUT / "build" / "pictures"
CURE: Final = "install Debian's chromium, then `tox -e system -- tests/system/test_live_page.py`"
FLAGS: Final = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")
SECRET: Final = "a-secret"
SIZES: Final = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 360, "height": 740}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium; on CI a missing one is a failure, elsewhere a reason to skip."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if sync_playwright is None or chromium is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"Chromium or playwright is missing: {CURE}")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=[*FLAGS])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """Start a master with facts, and a worker whose function cannot take the third."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(APP)
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    with (
        Daemon(folder, "master", "--stream=orders", "--stream=quiet", "--secret-file=secret", *LOCAL) as master,
        Daemon(folder, "worker", *follow(master), "--app=shop", "--secret-file=secret", HTTP) as worker,
    ):
        append(master.address("HTTP"), "orders", [order(), order(), order(bad=True), order()], SECRET)
        yield master, worker


@contextmanager
def opened(browser: Any, process: Daemon, size: str = "desktop", path: str = "/", **options: Any) -> Iterator[Any]:
    """Give the page of a process; at its end no error may be in the console, and no other host may have been called."""
    origin = f"http://{process.address('HTTP')}"
    login = {"username": "anna", "password": SECRET}
    with ExitStack() as stack:
        context = browser.new_context(viewport=SIZES[size], http_credentials=login, **options)
        stack.callback(context.close)
        page = context.new_page()
        errors: list[str] = []
        called: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: called.append(request.url))
        page.goto(f"{origin}{path}")
        yield page
        # A browser asks once for a picture of its own, which there is not.
        assert [each for each in errors if "401" not in each and "404" not in each] == []
        assert [each for each in called if not each.startswith(origin)] == []


def keep(page: Any, name: str) -> Path:
    """Store a picture of the whole page."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
    return PICTURES / f"{name}.png"


def cells(page: Any, stream: str) -> Any:
    """Return the locator of the row of a stream."""
    return page.get_by_role("region", name="Streams").get_by_role("row").filter(has_text=stream)


def test_facts_are_seen_moving_without_a_reload(browser: Any, shop: tuple[Daemon, Daemon]) -> None:
    master, _ = shop
    with opened(browser, master) as page:
        cells(page, "orders").get_by_text("writing").wait_for()
        (*_, last) = append(master.address("HTTP"), "orders", [order()], SECRET)
        cells(page, "orders").get_by_role("cell", name=f"{last:,}", exact=True).wait_for()
        page.get_by_role("region", name="Connections").get_by_text("worker1").wait_for()
        assert keep(page, "master").stat().st_size


def test_a_fact_is_found_by_keyboard_alone(browser: Any, shop: tuple[Daemon, Daemon]) -> None:
    master, _ = shop
    with opened(browser, master) as page:
        for text in ("orders", "4", "", "orde"):
            page.keyboard.press("Tab")
            page.keyboard.type(text)
        page.keyboard.press("Enter")
        page.get_by_role("region", name="Fact 4 of orders").get_by_text("bad").wait_for()
        assert "quiet" not in page.get_by_role("region", name="Streams").inner_text()


def test_the_latest_facts_are_followed_and_can_be_paused(browser: Any, shop: tuple[Daemon, Daemon]) -> None:
    master, _ = shop
    with opened(browser, master, path="/?stream=orders") as page:
        latest = page.get_by_role("region", name="Latest facts of orders")
        (*_, last) = append(master.address("HTTP"), "orders", [order()], SECRET)
        latest.get_by_role("cell", name=str(last), exact=True).wait_for()
        page.get_by_label("follow the latest facts").uncheck()
        (*_, after) = append(master.address("HTTP"), "orders", [order()], SECRET)
        cells(page, "orders").get_by_role("cell", name=str(after), exact=True).wait_for()
        page.wait_for_timeout(2_500)  # a request every 2 s, if it were not paused
        assert latest.get_by_role("cell", name=str(after), exact=True).count() == 0


def test_an_update_keeps_the_keyboard_and_the_scroll_bar_where_they_are(
    browser: Any, shop: tuple[Daemon, Daemon]
) -> None:
    master, _ = shop
    # Each is one step: an update between two steps would replace the element.
    place = "document.querySelector('[aria-label=Streams]').scrollLeft"
    with opened(browser, master, "phone") as page:
        page.evaluate("[...document.querySelectorAll('a')].find(each => each.innerText === 'orders').focus()")
        page.evaluate(f"{place} = 70")
        (*_, last) = append(master.address("HTTP"), "orders", [order()], SECRET)
        cells(page, "orders").get_by_role("cell", name=f"{last:,}", exact=True).wait_for()
        assert page.evaluate("document.activeElement.innerText") == "orders"
        assert page.evaluate(place) == 70


def test_without_javascript_the_tables_can_be_read(browser: Any, shop: tuple[Daemon, Daemon]) -> None:
    master, _ = shop
    with opened(browser, master, java_script_enabled=False) as page:
        assert "writing" in cells(page, "orders").inner_text()


@pytest.mark.parametrize(("size", "scheme"), [("desktop", "light"), ("phone", "dark")])
def test_it_is_accessible_and_fits_a_phone(browser: Any, shop: tuple[Daemon, Daemon], size: str, scheme: str) -> None:
    """With a stream that is stopped, and the latest facts of a stream."""
    from axe_playwright_python.sync_playwright import Axe

    _, worker = shop
    with opened(browser, worker, size, "/?stream=orders", color_scheme=scheme, bypass_csp=True) as page:
        page.get_by_role("heading", name="Needs attention").wait_for()
        keep(page, f"stopped-{size}-{scheme}")
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_stopped_stream_is_found_understood_and_mended_from_the_page(
    browser: Any, shop: tuple[Daemon, Daemon]
) -> None:
    _, worker = shop
    with opened(browser, worker) as page:
        trouble = page.get_by_role("listitem").filter(has_text="orders of master")
        assert "ValueError: a bad order" in trouble.inner_text()
        assert "stopped" in cells(page, "orders").inner_text()
        assert "not ready" in page.get_by_role("status").inner_text()
        trouble.get_by_role("link", name="fact 4").click()
        page.get_by_role("region", name="Fact 4 of orders").get_by_text("bad").wait_for()
        page.on("dialog", lambda dialog: dialog.accept())
        trouble.get_by_role("button", name="leave it out: fact 4").click()
        page.get_by_role("status").get_by_text("fact 4 is left out").wait_for()
        page.get_by_role("status").get_by_text("ready", exact=True).wait_for()
        cells(page, "orders").get_by_text("live").wait_for()
        page.get_by_role("heading", name="Needs attention").wait_for(state="detached")
        keep(page, "mended")


def test_a_room_is_a_picture_that_is_walked_by_keyboard(browser: Any, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    events = [
        {"event_id": "$create", "type": "m.room.create", "state_key": "", "prev_event_ids": []},
        {"event_id": "$topic", "type": "m.room.topic", "state_key": "", "prev_event_ids": ["$create"]},
        {"event_id": "$left", "type": "m.room.message", "prev_event_ids": ["$topic"]},
        {"event_id": "$right", "type": "m.room.message", "prev_event_ids": ["$topic"]},
    ]
    with Daemon(tmp_path, "master", "--rooms", *LOCAL) as master:
        body = json.dumps({"events": events}).encode()
        url = f"http://{master.address('HTTP')}/v1/rooms/!garden/events"
        urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=30).close()
        with opened(browser, master, path="/?room=!garden", bypass_csp=True) as page:
            assert "2 forward" in page.get_by_text("extremities").inner_text()
            keep(page, "room")
            for _ in range(2):
                page.get_by_role("link", name="one event back").focus()
                page.keyboard.press("Enter")
            page.get_by_role("heading", name="State after $topic").wait_for()
            assert "$left" not in page.get_by_role("region", name="Events").inner_text()
            assert Axe().run(page).violations_count == 0
