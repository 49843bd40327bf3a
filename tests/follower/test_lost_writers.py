"""Writers that no process knows any more: named in the log and in ``notes``, unless any process may know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

from replication.errors import CatchUpError, StoreError
from replication.follower.confirmed_notes import LONGEST_PAUSE
from replication.follower.links import FollowedLinks
from replication.follower.lost_writers import CONFIRMED_AFTER, LostWriters
from replication.streams.history import Epoch
from replication.web.client import AuditedWriter
from replication.wire.grammar import InstanceName, Token
from tests.doubles import logged
from tests.follower.cases import ORDERS, FollowerCase, fact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.history import History
    from replication.wire.grammar import StreamName

HERE = InstanceName("here")
NOTE = (
    "no followed process knows writer 'master' of stream 'orders' any more, and its facts up to 3 stay here: "
    "was the database emptied or exchanged? The cure is in docs/operations.md, Backups"
)


class FakeHttp:
    """The list of writers of one process, each with its state."""

    def __init__(self, **writers: str) -> None:
        self.writers = writers
        self.asked = 0
        self.away = False

    async def audited(self) -> Mapping[StreamName, Mapping[InstanceName, AuditedWriter]]:
        self.asked += 1
        if self.away:
            raise CatchUpError("away")
        found = {InstanceName(name): state for name, state in self.writers.items()}
        return {ORDERS: {each: AuditedWriter(each, Token(9), state=state) for each, state in found.items()}}


class LostWritersTests(FollowerCase):
    def setUp(self) -> None:
        super().setUp()
        self.at(1, 1)
        self.rows(fact(2), fact(3))
        self.follower.connection_lost("link")
        self.history: History = [Epoch("a", Token(1), Token(1))]
        self.locked = False
        self.links = FollowedLinks()
        self.http = FakeHttp(other="writing")

    def look(self, *https: FakeHttp, state: str = "following", looks: int = 2) -> tuple[list[str], list[str]]:
        """Return what is logged, and the notes, after a look at processes with these lists."""
        sources: dict[str, Any] = {f"tcp:{number}": http for number, http in enumerate(https)}
        for endpoint in sources:
            self.links.add(Mock(endpoint=endpoint, state=state))
        self.lost = LostWriters(
            instance_name=HERE,
            links=self.links,
            followers=[self.follower],
            over_http=lambda endpoint: [sources[endpoint]],
            lifetime=self.process.lifetime,
            patience=5.0,
        )
        self.follower.histories = Mock(followed=self.followed)
        with logged() as messages:
            self.lost.following()
            self.process.clock.pump([5.0, CONFIRMED_AFTER][:looks])
        return messages, [*self.lost.notes(ORDERS)]

    async def followed(self, _: InstanceName) -> History:
        if self.locked:
            raise StoreError("locked")
        return self.history

    def test_a_writer_that_no_database_has_is_logged_once_and_noted(self) -> None:
        self.assertEqual(self.look(self.http), ([NOTE], [NOTE]))
        with logged() as messages:
            self.lost.following()
            self.process.clock.advance(5.0)
        self.assertEqual((messages, self.lost.notes(ORDERS), self.http.asked), ([], [NOTE], 3))
        self.http.writers["master"] = "former"  # the right database is back
        self.process.clock.advance(LONGEST_PAUSE)
        self.assertEqual((self.lost.notes(ORDERS), self.http.asked), ([], 4))
        self.process.clock.advance(LONGEST_PAUSE)
        self.assertEqual(self.http.asked, 4)

    def test_a_name_that_is_taken_over_between_two_looks_is_not_lost(self) -> None:
        """A takeover lasts some seconds.  The note stayed until the next connection, and its cure deletes facts."""
        self.assertEqual(self.look(self.http, looks=1), ([], []))
        self.http.writers["master"] = "former"
        with logged() as messages:
            self.process.clock.advance(CONFIRMED_AFTER)
        self.assertEqual((messages, self.lost.notes(ORDERS), self.http.asked), ([], [], 2))

    def test_a_writer_that_one_of_the_databases_has_is_not_lost(self) -> None:
        for state in ("former", "elsewhere"):
            self.setUp()
            self.assertEqual(self.look(self.http, FakeHttp(third="writing", master=state)), ([], []))

    def test_a_relay_does_not_know_all_writers(self) -> None:
        self.assertEqual(self.look(self.http, FakeHttp(third="live")), ([], []))

    def test_a_stream_that_no_process_lists_is_left_out(self) -> None:
        async def nothing() -> Mapping[StreamName, Mapping[InstanceName, AuditedWriter]]:
            return {}

        self.http.audited = nothing  # type: ignore[method-assign]
        self.assertEqual(self.look(self.http), ([], []))

    def test_a_writer_without_a_history_is_left_out(self) -> None:
        self.history = []
        self.assertEqual(self.look(self.http), ([], []))

    def test_a_writer_that_sends_its_position_is_not_lost(self) -> None:
        self.at(3, 3, link="next")
        self.assertEqual(self.look(self.http), ([], []))

    def test_while_a_process_is_not_connected_nothing_is_known(self) -> None:
        self.assertEqual(self.look(self.http, state="connecting"), ([], []))
        self.assertEqual(self.http.asked, 0)

    def test_a_process_that_does_not_answer_is_asked_again(self) -> None:
        self.http.away = True
        self.assertEqual(self.look(self.http, looks=1), ([], []))
        self.http.away = False
        with logged() as messages:
            self.process.clock.pump([15.0, CONFIRMED_AFTER])
        self.assertEqual(messages, [NOTE])
        self.assertLess(15.0, LONGEST_PAUSE)

    def test_a_store_that_does_not_answer_is_read_again(self) -> None:
        self.locked = True
        self.assertEqual(self.look(self.http, looks=1), ([], []))
        self.locked = False
        with logged() as messages:
            self.process.clock.pump([15.0, CONFIRMED_AFTER])
        self.assertEqual(messages, [NOTE])

    def test_a_later_connection_ends_an_earlier_look(self) -> None:
        self.look(self.http, looks=0)
        self.process.clock.advance(4.0)
        self.lost.following()
        self.process.clock.advance(4.0)
        self.assertEqual(self.http.asked, 0)
        self.process.clock.advance(1.0)
        self.assertEqual(self.http.asked, 1)
        self.process.clock.advance(CONFIRMED_AFTER)
        self.assertEqual((self.http.asked, [*self.lost.notes(ORDERS)]), (2, [NOTE]))
