"""Which links have sent their first positions, and which other link is followed when a connection is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from replication.follower.links import FollowedLinks, is_open
from replication.streams.history import UNKNOWN_HISTORY
from replication.wire.commands import Ping
from replication.wire.grammar import InstanceName, StreamName
from tests.doubles import begin, error_of, now

if TYPE_CHECKING:
    from replication.streams.history import History

ONE, TWO = InstanceName("one"), InstanceName("two")
ORDERS, STOCK = StreamName("orders"), StreamName("stock")
OLD, NEW = '[1,[["old",1,1]]]', '[1,[["new",1,1]]]'


def names(history: History | None) -> list[str] | None:
    """Return the names of the epochs."""
    return None if history is None else [each.name for each in history]


@attrs.define(eq=False)
class Link:
    """A link that counts how often it requests positions."""

    endpoint: str
    state: str = "connected"
    requests: int = 0
    answers: list[str | None] = attrs.field(factory=lambda: [""])  # the last one is repeated
    questions: list[str] = attrs.field(factory=list)

    def echo(self, question: str = "") -> Deferred[str | None]:
        """Answer a question."""
        self.questions.append(question)
        return succeed(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    def request_positions(self) -> None:
        """Count the request."""
        self.requests += 1


class LinksTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.links = FollowedLinks()

    def add(self, endpoint: str, state: str = "connected") -> Any:
        link: Any = Link(endpoint, state)
        self.links.add(link)
        return link

    def test_a_relay_may_not_have_found_all_writers(self) -> None:
        relay = self.add("tcp:a:1", "following")
        self.links.position_received(relay, ORDERS, ONE)
        self.links.following(relay)
        for text, found in (
            ("1", True),
            ("1 echo", True),
            ("1 partial echo", False),
            ("2", False),
            ("echo 1 orders one", False),
            ("complete", True),
            ("1 partial echo", False),
            ("1 echo", True),
        ):
            self.links.pinged(relay, Ping(text))
            self.assertEqual(self.links.all_writers_found(), found, text)
        self.assertTrue(self.links.all_positions_received())

    def test_first_positions_are_complete_once_each_link_has_sent_some_and_follows(self) -> None:
        first, second = self.add("tcp:a:1"), self.add("tcp:b:1")
        waiting = begin(self.links.first_positions())
        self.links.following(first)
        self.assertEqual(self.links.silent_endpoints(), ["tcp:a:1", "tcp:b:1"], "it has sent no position")
        self.links.position_received(first, ORDERS, ONE)
        self.links.following(first)
        self.assertEqual((self.links.silent_endpoints(), waiting), (["tcp:b:1"], []))
        self.links.position_received(second, ORDERS, TWO)
        self.assertFalse(self.links.all_positions_received(), "more may come")
        self.links.following(second)
        self.links.following(second)
        self.assertEqual((self.links.silent_endpoints(), waiting), ([], [None]))
        self.assertTrue(self.links.all_positions_received())
        self.assertEqual(self.links.endpoints, {ONE: "tcp:a:1", TWO: "tcp:b:1"})
        self.assertEqual([*self.links], [first, second])

    def test_a_link_is_late_that_follows_before_its_first_position(self) -> None:
        link = self.add("tcp:a:1")
        self.assertFalse(self.links.is_late(link))
        link.state = "following"
        self.assertTrue(self.links.is_late(link))
        self.links.position_received(link, ORDERS, ONE)
        self.links.following(link)
        self.assertFalse(self.links.is_late(link))

    def test_a_stop_ends_the_waiting(self) -> None:
        link = self.add("tcp:a:1")
        self.add("tcp:b:1")
        self.links.position_received(link, ORDERS, ONE)
        self.links.following(link)
        waiting = begin(self.links.first_positions())
        self.links.end_waiting()
        self.assertEqual(waiting, [None])

    def test_a_redis_is_no_endpoint_of_a_writer(self) -> None:
        self.add("redis://localhost/")
        self.assertEqual(self.links.silent_endpoints(), [])
        self.assertFalse(self.links.all_positions_received())

    def test_the_link_that_has_sent_the_last_position_of_a_writer_is_asked_for_its_history(self) -> None:
        first, second = self.add("tcp:a:1"), self.add("tcp:b:1")
        first.answers, second.answers = [OLD], [NEW]
        self.assertIsNone(now(self.links.history(ORDERS, ONE)), "no link has sent a position")
        for link in (first, second):
            self.links.position_received(link, ORDERS, ONE)
        self.assertEqual(names(now(self.links.history(ORDERS, ONE))), ["new"])
        self.assertEqual(second.questions, ["orders one 0"])
        self.links.lost(second)
        self.assertIsNone(now(self.links.history(ORDERS, ONE)), "until the other link sends its position again")
        self.links.position_received(first, ORDERS, ONE)
        self.assertEqual(names(now(self.links.history(ORDERS, ONE))), ["old"])

    def test_the_link_on_which_a_writer_is_followed_is_asked_whichever_has_sent_the_last_position(self) -> None:
        """Pages were fetched from a second database with a writer of the same name, and rows came from the first."""
        first, second = self.add("tcp:a:1"), self.add("tcp:b:1")
        first.answers, second.answers = [OLD], [NEW]
        for link in (first, second):
            self.links.position_received(link, ORDERS, ONE)
        self.links.followed = lambda _stream, _writer: first
        self.assertEqual(self.links.endpoint(ORDERS, ONE), "tcp:a:1")
        self.assertEqual(names(now(self.links.history(ORDERS, ONE))), ["old"])

    def test_a_history_arrives_in_parts(self) -> None:
        link = self.add("tcp:a:1")
        self.links.position_received(link, ORDERS, ONE)
        first, second = '[3,[["a",1,1],["b",2,2]]]', '[3,[["c",3,3]]]'
        for answers, found in (
            ([first, second], ["a", "b", "c"]),
            (["[0,[]]"], []),
            ([""], []),  # an older version sends nothing
            ([first, None], None),
        ):
            link.answers = [*answers]
            self.assertEqual(names(now(self.links.history(ORDERS, ONE))), found, answers)

    def test_a_part_of_a_history_is_none(self) -> None:
        """A relay that loses its own writer has no history any more: the follower went back to the end of the part."""
        link = self.add("tcp:a:1")
        self.links.position_received(link, ORDERS, ONE)
        first = '[3,[["a",1,1],["b",2,2]]]'
        for second in ("[0,[]]", "[3,[]]", '[4,[["c",3,3],["d",4,4]]]', "{", '[2,[["a",1,1]]]'):
            link.answers = [first, second]
            error = str(error_of(begin(self.links.history(ORDERS, ONE))))
            self.assertEqual(error, "the process at tcp:a:1 has sent only a part of the history of one", second)
        link.answers = [f'[{10**9},[["a",1,1]]]']  # it would have no end
        self.assertIn("only a part", str(error_of(begin(self.links.history(ORDERS, ONE)))))

    def test_a_writer_that_cannot_read_its_history_has_one(self) -> None:
        link = self.add("tcp:a:1")
        self.links.position_received(link, ORDERS, ONE)
        link.answers = [UNKNOWN_HISTORY]
        self.assertEqual(
            str(error_of(begin(self.links.history(ORDERS, ONE)))),
            "the process at tcp:a:1 cannot read the history of one now",
        )

    def test_of_each_stream_the_link_that_has_sent_the_last_position_of_a_former_writer_has_its_facts(self) -> None:
        """Two processes send positions of a writer that was removed, and only one of them has all of its streams."""
        both, one = self.add("tcp:a:1"), self.add("tcp:b:1")
        self.assertIsNone(self.links.endpoint(ORDERS, ONE))
        for link, stream in ((both, STOCK), (both, ORDERS), (one, ORDERS)):
            self.links.position_received(link, stream, ONE)
        found = [self.links.endpoint(stream, ONE) for stream in (STOCK, ORDERS)]
        self.assertEqual(found, ["tcp:a:1", "tcp:b:1"])
        both.answers = [NEW]
        self.assertEqual(names(now(self.links.history(STOCK, ONE))), ["new"])
        self.assertEqual(both.questions, ["stock one 0"])

    def test_a_relay_may_be_replaced_by_one_that_does_not_send_whether_it_has_found_all(self) -> None:
        link = self.add("tcp:a:1")
        self.links.position_received(link, ORDERS, ONE)
        self.links.following(link)
        self.links.pinged(link, Ping("1 partial echo"))
        self.links.following(link)
        self.assertEqual((self.links.all_writers_found(), self.links.partial_relays()), (False, ["tcp:a:1"]))
        self.links.lost(link)
        self.assertEqual((self.links.all_writers_found(), self.links.partial_relays()), (False, ["tcp:a:1"]))
        self.links.pinged(link, Ping("2"))
        self.assertFalse(self.links.all_writers_found())
        self.links.following(link)
        self.assertEqual((self.links.all_writers_found(), self.links.partial_relays()), (True, []))
        self.links.pinged(link, Ping("partial"))
        self.links.lost(link)
        self.links.pinged(link, Ping("3 echo"))
        self.links.following(link)
        self.assertTrue(self.links.all_writers_found())

    def test_a_process_that_was_partial_is_complete_once_it_follows_again(self) -> None:
        """While it starts, it does not have to know yet that a position is missing, and its PING has no ``partial``."""
        link = self.add("tcp:a:1")
        self.links.position_received(link, ORDERS, ONE)
        self.links.following(link)
        self.links.pinged(link, Ping("partial"))
        self.links.lost(link)
        self.links.pinged(link, Ping("2 echo"))
        self.assertFalse(self.links.all_writers_found())
        self.links.pinged(link, Ping("partial"))
        self.links.following(link)
        self.assertFalse(self.links.all_writers_found())
        self.links.pinged(link, Ping("complete"))
        self.assertTrue(self.links.all_writers_found())

    def test_a_link_is_open_if_it_answers(self) -> None:
        link = self.add("tcp:a:1")
        self.assertTrue(now(is_open(link)))
        link.answers = [None]
        self.assertFalse(now(is_open(link)))

    def test_all_open_links_to_a_writer_request_positions(self) -> None:
        links = [self.add(f"tcp:{name}:1") for name in "abc"]
        for link, writer in zip(links, (ONE, ONE, TWO), strict=True):
            self.links.position_received(link, ORDERS, writer)
        self.links.request_positions(ONE)
        self.assertEqual([link.requests for link in links], [1, 1, 0])

    def test_after_a_loss_the_other_links_to_its_writers_request_positions_once(self) -> None:
        lost, same, other = self.add("tcp:a:1"), self.add("tcp:b:1"), self.add("tcp:c:1")
        for link, writer in ((lost, ONE), (lost, TWO), (same, ONE), (same, TWO), (other, InstanceName("three"))):
            self.links.position_received(link, ORDERS, writer)
        self.links.lost(lost)
        self.assertEqual((lost.requests, same.requests, other.requests), (0, 1, 0))
        self.links.lost(same)
        self.assertEqual((lost.requests, same.requests, other.requests), (0, 1, 0), "the first one is not open")
