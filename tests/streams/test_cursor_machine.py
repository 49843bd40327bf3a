"""A cursor against a writer that does everything a writer may do, over links that do everything that links do.

The writer commits, rolls back, hands over late, answers REPLICATE in the old and in the new way, restarts and is
restored from old backups.  Links are cut between any two commands.  Steps and pages take their time, and fail.  The
invariants are those of field.md 3.1; when the faults stop, the follower has what the writer has.
"""

from __future__ import annotations

from collections import deque
from itertools import count, groupby

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replication.errors import CatchUpError
from replication.streams.cursor import Apply, CatchUp, Cursor, Reset
from replication.streams.facts import Fact, fact_bytes, is_ascending, row_bytes, tokens_of
from replication.streams.seams import Page
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token

MAX_HELD_BYTES = 1200  # about six facts of a row
MAX_APPLY_ROWS = 4


def position(prev: int, new: int) -> Position:
    return Position(StreamName("orders"), InstanceName("master"), Token(prev), Token(new))


class OneLink(RuleBasedStateMachine):
    """A writer, a follower, and at most one link between them at a time."""

    max_links = 1

    def __init__(self) -> None:
        super().__init__()
        self.serials = count()
        # the writer
        self.log: list[Fact] = []
        self.lives = [self.log]  # a log for each time that the writer was restored
        self.settled = self.handed_over = 1
        self.over_long: set[int] = set()
        self.unknown_life = False  # restored, and the follower has not been told a position since
        # the links: what is under way on each
        self.links: dict[str, deque[Position | tuple[Token | None, str]]] = {}
        self.asked_on: set[str] = set()  # those on which a REPLICATE was answered
        # the follower: its database, and what it is doing
        self.stored: list[Fact] = []
        self.stored_position = Token(0)
        self.cursor = self.new_cursor()
        self.under_way: Apply | CatchUp | Reset | None = None
        self.early_page: Page | None = None
        self.last_asked: Apply | CatchUp | Reset | None = None
        self.largest_page = 0

    def new_cursor(self) -> Cursor:
        return Cursor(self.stored_position, max_held_bytes=MAX_HELD_BYTES, max_apply_rows=MAX_APPLY_ROWS)

    # ---- the writer

    @initialize(history=st.integers(0, 5))
    def begin(self, history: int) -> None:
        """Some facts were there before anybody listened."""
        for _ in range(history):
            self.commit(rows=1)
        self.handed_over = self.settled

    @precondition(lambda self: not self.unknown_life)
    @rule(data=st.data(), facts=st.integers(1, 6), at_once=st.booleans())
    def write(self, data: st.DataObject, facts: int, at_once: bool) -> None:
        """Commit facts; some have no rows, some are too long for the wire, some IDs before them were rolled back."""
        for _ in range(facts):
            if data.draw(st.booleans()):
                self.commit(rows=1)
            else:
                self.commit(
                    rows=data.draw(st.integers(0, 5)),
                    width=data.draw(st.sampled_from([0, 0, 0, 150, 300])),
                    rolled_back=data.draw(st.sampled_from([0, 0, 1, 2])),
                    over_long=data.draw(st.sampled_from([False, False, False, True])),
                )
        if at_once:
            self.hand_over()

    def commit(self, rows: int, width: int = 0, rolled_back: int = 0, over_long: bool = False) -> None:
        token = Token(self.settled + rolled_back + 1)
        if rows:
            serial = next(self.serials)
            self.log.append(Fact(token, tuple(f'"{serial}.{ordinal:0{width}}"' for ordinal in range(rows))))
            if over_long:
                self.over_long.add(token)
        self.settled = token

    @precondition(lambda self: self.handed_over < self.settled)
    @rule()
    def hand_over(self) -> None:
        """Say on every link what has settled since the last time."""
        told = self.handed_over
        said: list[Position | tuple[Token | None, str]] = []
        for token, texts in self.log:
            if token <= self.handed_over:
                continue
            if token in self.over_long:
                said.append(position(token, token))
            else:
                said += [(None, text) for text in texts[:-1]]
                said.append((token, texts[-1]))
            told = token
        if told < self.settled:
            said.append(position(told, self.settled))
        for wire in self.links.values():
            wire.extend(said)
        self.handed_over = self.settled

    @precondition(lambda self: self.links)
    @rule(data=st.data(), early=st.booleans())
    def answer_replicate(self, data: st.DataObject, early: bool) -> None:
        """Say how far we are; up to 1.96 that overtakes what is not handed over yet (D4)."""
        link = data.draw(st.sampled_from(sorted(self.links)))
        place = self.settled if early else self.handed_over
        self.links[link].append(position(place, place))
        self.asked_on.add(link)

    @precondition(lambda self: self.asked_on and self.max_links == 1)
    @rule(data=st.data())
    def repeat_an_old_position(self, data: st.DataObject) -> None:
        """Say again what was true; on a link that is not followed, nobody could tell that from a writer gone back."""
        link = data.draw(st.sampled_from(sorted(self.asked_on)))
        new = data.draw(st.integers(0, self.handed_over))
        prev = max([0, *(fact.token for fact in self.log if fact.token <= new)])
        self.links[link].append(position(data.draw(st.integers(prev, new)), new))

    # ---- the links

    @precondition(lambda self: len(self.links) < self.max_links)
    @rule(asked=st.sampled_from([True, True, False]))
    def connect(self, asked: bool) -> None:
        link = f"link {next(self.serials)}"
        self.links[link] = deque()
        if asked:
            self.links[link].append(position(self.handed_over, self.handed_over))
            self.asked_on.add(link)

    @precondition(lambda self: any(self.links.values()))
    @rule(data=st.data(), commands=st.integers(1, 30))
    def deliver(self, data: st.DataObject, commands: int) -> None:
        link = data.draw(st.sampled_from(sorted(link for link, wire in self.links.items() if wire)))
        wire = self.links[link]
        heard = [wire.popleft() for _ in range(min(commands, len(wire)))]
        for _, run in groupby(heard, key=lambda each: id(each) if isinstance(each, Position) else None):
            rows = []
            for each in run:
                if isinstance(each, Position):
                    self.cursor.position_heard(link, each.prev, each.new)
                    self.unknown_life = False
                else:
                    rows.append(each)
            if rows:
                self.cursor.rows_heard(link, [place for place, _ in rows], [text for _, text in rows])

    # ---- trouble

    @rule(
        data=st.data(),
        kind=st.sampled_from(["link", "link", "writer", "backup", "backup", "follower"]),
        over_soon=st.booleans(),
    )
    def make_trouble(self, data: st.DataObject, kind: str, over_soon: bool) -> None:
        """Cut a link; or restart the writer, or the follower; or bring up an old backup of the writer.

        The tokens above a backup will be given to other facts.
        """
        self.break_something(data, kind)
        if over_soon and not self.links:
            self.connect(asked=True)
            self.deliver(data, commands=1)

    def break_something(self, data: st.DataObject, kind: str) -> None:
        if kind == "link":
            if self.links:
                self.cut(data.draw(st.sampled_from(sorted(self.links))))
            return
        if kind == "follower" and isinstance(self.cursor.step(), Reset):
            return  # until the Reset is durable, only the process knows of the new life: the wire does not name lives
        for link in sorted(self.links):
            self.cut(link)
        if kind == "follower":
            self.cursor = self.new_cursor()
            self.last_asked = self.under_way = self.early_page = None
            return
        if kind == "backup":
            self.settled = max(0, self.settled - data.draw(st.integers(0, 10)))
            self.over_long = {token for token in self.over_long if token <= self.settled}
            self.log = [fact for fact in self.log if fact.token <= self.settled]
            self.lives.append(self.log)
            self.unknown_life = True
        self.handed_over = self.settled

    def cut(self, link: str) -> None:
        del self.links[link]
        self.asked_on.discard(link)
        self.cursor.link_lost(link)

    # ---- the follower

    @precondition(lambda self: self.under_way is None and self.cursor.step() is not None)
    @rule(data=st.data(), early=st.booleans())
    def begin_a_step(self, data: st.DataObject, early: bool) -> None:
        self.under_way = self.cursor.step()
        if early and isinstance(self.under_way, CatchUp):
            self.early_page = self.page(self.under_way, data)

    @precondition(lambda self: self.under_way is not None)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_a_step(self, data: st.DataObject, fails: bool) -> None:
        if fails:
            self.under_way = self.early_page = None
            return
        if isinstance(self.under_way, CatchUp):
            page = self.early_page or self.page(self.under_way, data)
            try:
                self.cursor.fetched(self.under_way, page)
            except CatchUpError:
                assert page.upto <= self.under_way.after
        elif self.under_way is not None:
            self.commit_step(self.under_way)
        self.last_asked = self.under_way = self.early_page = None

    @precondition(lambda self: self.under_way is None)
    @rule(data=st.data(), steps=st.integers(1, 5))
    def do_some_steps(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            self.under_way = self.cursor.step()
            self.end_a_step(data, fails=False)

    def commit_step(self, step: Apply | Reset) -> None:
        assert step.after == self.stored_position
        if isinstance(step, Reset):
            assert step.to < self.stored_position  # I3: it goes back by a Reset only
            assert len(self.lives) > 1 or self.max_links > 1
            self.stored = [fact for fact in self.stored if fact.token <= step.to]
            self.stored_position = step.to
        else:
            assert is_ascending([step.after, *tokens_of(step.facts), Token(step.upto + 1)])  # I7
            assert step.after < step.upto  # I3
            self.stored += step.facts
            self.stored_position = step.upto
        self.cursor.applied(step)

    def page(self, step: CatchUp, data: st.DataObject) -> Page:
        """Draw what a source might answer: whole facts, not all of them, and perhaps some that nobody asked for."""
        upto = min(step.upto, self.settled)
        asked = [fact for fact in self.log if step.after < fact.token <= upto]
        answered = data.draw(st.integers(1, 3))
        limited = answered < len(asked)
        if limited:
            asked = asked[:answered]
            upto = asked[-1].token
        if data.draw(st.booleans()):
            unasked = [fact for fact in self.log if not step.after < fact.token <= upto]
            asked = sorted(asked + [fact for fact in unasked if data.draw(st.booleans())])
        self.largest_page = max(self.largest_page, fact_bytes(asked))
        return Page(asked, Token(upto), limited)

    # ---- what must hold

    @invariant()
    def what_is_stored_is_what_was_written(self) -> None:
        """Hold I1, I2 and I4: all facts up to the position, each once and whole, of one life of the writer."""
        assert self.cursor.position == self.stored_position
        lives = ([fact for fact in log if fact.token <= self.stored_position] for log in self.lives)
        assert self.stored in lives

    @invariant()
    def memory_is_bounded(self) -> None:
        """Hold I9."""
        cursor = self.cursor
        counted = fact_bytes(cursor._ready) + fact_bytes(cursor._held) + row_bytes(cursor._begun)
        assert cursor.held_bytes == counted
        assert counted <= MAX_HELD_BYTES + self.largest_page

    @invariant()
    def a_step_can_be_asked_for_again(self) -> None:
        step = self.cursor.step()
        assert step == self.cursor.step()
        assert self.cursor.live == (self.cursor.linked and step is None)
        if isinstance(step, Apply):
            assert len(step.facts) <= 1 or sum(len(fact.texts) for fact in step.facts) <= MAX_APPLY_ROWS
            if isinstance(self.last_asked, Apply) and self.last_asked.epoch == step.epoch:
                assert step.facts[: len(self.last_asked.facts)] == self.last_asked.facts
        self.last_asked = step

    @invariant()
    def a_live_follower_has_everything_that_was_handed_over(self) -> None:
        if self.cursor.live and not any(self.links.values()) and not self.unknown_life:
            assert self.stored_position >= self.handed_over

    def teardown(self) -> None:
        """Let the faults stop: without another restart, the follower gets what the writer has (I10)."""
        if self.under_way is not None and not isinstance(self.under_way, CatchUp):
            self.commit_step(self.under_way)
        self.links = self.links or {"the last": deque()}
        for wire in self.links.values():
            wire.append(position(self.handed_over, self.handed_over))
        self.hand_over()
        for link, wire in self.links.items():
            for each in wire:
                if isinstance(each, Position):
                    self.cursor.position_heard(link, each.prev, each.new)
                else:
                    self.cursor.rows_heard(link, [each[0]], [each[1]])
        for _ in range(1000):
            step = self.cursor.step()
            if step is None:
                break
            if isinstance(step, CatchUp):
                facts = [fact for fact in self.log if step.after < fact.token <= step.upto]
                self.cursor.fetched(step, Page(facts, step.upto, limited=False))
            else:
                self.commit_step(step)
        assert self.cursor.live
        assert self.stored == self.log
        assert self.cursor.position == self.cursor.announced == self.settled


class TwoLinks(OneLink):
    """The same with two links to the writer at once."""

    max_links = 2


TestOneLink = OneLink.TestCase
TestTwoLinks = TwoLinks.TestCase
