"""A cursor against a model of a writer and of the connections to it, with every fault that is allowed.

The writer commits, rolls back, publishes late, answers REPLICATE in the old and in the new way, restarts and is
restored from old backups.  Links are cut between any two commands.  Steps and pages take time, and fail.  The
invariants are those of docs/protocol/invariants.md.  When the faults stop, the follower has all facts of the writer.
"""

from __future__ import annotations

from collections import deque
from itertools import count, groupby
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replication.errors import CatchUpError
from replication.streams.cursor import Apply, CatchUp, Check, Cursor, Reset
from replication.streams.facts import Fact, fact_bytes, is_ascending, row_bytes, tokens_of
from replication.streams.history import Epoch, begin_epoch, common_position
from replication.streams.interfaces import Page
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from replication.streams.history import History

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
        self.histories = [self.log]  # one log for each restore of the writer
        self.settled = self.published = 1
        self.too_long: set[int] = set()
        self.restored = False  # and the follower has not received a position since
        # the links, with the commands in transit on each
        self.links: dict[str, deque[Position | tuple[Token | None, str]]] = {}
        self.asked_on: set[str] = set()  # the links on which a REPLICATE was answered
        # the follower: its database, and its step in progress
        self.stored: list[Fact] = []
        self.stored_position = Token(0)
        self.cursor = self.new_cursor()
        self.in_progress: Apply | CatchUp | Check | Reset | None = None
        self.early_page: Page | None = None
        self.last_asked: Apply | CatchUp | Check | Reset | None = None
        self.largest_page = 0

    def new_cursor(self) -> Cursor:
        return Cursor(self.stored_position, max_held_bytes=MAX_HELD_BYTES, max_apply_rows=MAX_APPLY_ROWS)

    # ---- the writer

    @initialize(history=st.integers(0, 5))
    def begin(self, history: int) -> None:
        """Commit some facts before the first connection."""
        for _ in range(history):
            self.commit(rows=1)
        self.published = self.settled

    @precondition(lambda self: not self.restored)
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
                    too_long=data.draw(st.sampled_from([False, False, False, True])),
                )
        if at_once:
            self.publish()

    def commit(self, rows: int, width: int = 0, rolled_back: int = 0, too_long: bool = False) -> None:
        token = Token(self.settled + rolled_back + 1)
        if rows:
            serial = next(self.serials)
            self.log.append(Fact(token, tuple(f'"{serial}.{ordinal:0{width}}"' for ordinal in range(rows))))
            if too_long:
                self.too_long.add(token)
        self.settled = token

    @precondition(lambda self: self.published < self.settled)
    @rule()
    def publish(self) -> None:
        """Send to every link what has settled since the last time."""
        lines = self.lines_after(self.published)
        for wire in self.links.values():
            wire.extend(lines)
        self.published = self.settled

    def lines_after(self, sent: int) -> list[Position | tuple[Token | None, str]]:
        """Return what a writer sends after ``sent``, up to what has settled."""
        lines: list[Position | tuple[Token | None, str]] = []
        for token, texts in self.log:
            if token <= sent:
                continue
            if token in self.too_long:
                lines.append(position(token, token))
            else:
                lines += [(None, text) for text in texts[:-1]]
                lines.append((token, texts[-1]))
            sent = token
        if sent < self.settled:
            lines.append(position(sent, self.settled))
        return lines

    @precondition(lambda self: self.links)
    @rule(data=st.data(), early=st.booleans())
    def answer_replicate(self, data: st.DataObject, early: bool) -> None:
        """Send the position; in a Synapse up to 1.96 it may overtake facts that are not published yet."""
        link = data.draw(st.sampled_from(sorted(self.links)))
        place = self.settled if early else self.published
        self.links[link].append(position(place, place))
        self.asked_on.add(link)

    @precondition(lambda self: self.asked_on and self.max_links == 1)
    @rule(data=st.data())
    def repeat_an_old_position(self, data: st.DataObject) -> None:
        """Repeat an old position.  On a link that is not followed, it would look like a writer that was reset."""
        link = data.draw(st.sampled_from(sorted(self.asked_on)))
        new = data.draw(st.integers(0, self.published))
        prev = max([0, *(fact.token for fact in self.log if fact.token <= new)])
        self.links[link].append(position(data.draw(st.integers(prev, new)), new))

    # ---- the links

    @precondition(lambda self: len(self.links) < self.max_links)
    @rule(asked=st.sampled_from([True, True, False]))
    def connect(self, asked: bool) -> None:
        link = f"link {next(self.serials)}"
        self.links[link] = deque()
        if asked:
            self.links[link].append(position(self.published, self.published))
            self.asked_on.add(link)

    @precondition(lambda self: any(self.links.values()))
    @rule(data=st.data(), commands=st.integers(1, 30))
    def deliver(self, data: st.DataObject, commands: int) -> None:
        link = data.draw(st.sampled_from(sorted(link for link, wire in self.links.items() if wire)))
        wire = self.links[link]
        received = [wire.popleft() for _ in range(min(commands, len(wire)))]
        for _, run in groupby(received, key=lambda each: id(each) if isinstance(each, Position) else None):
            rows = []
            for each in run:
                if isinstance(each, Position):
                    self.cursor.position_received(link, each.prev, each.new)
                    self.restored = False
                else:
                    rows.append(each)
            if rows:
                self.cursor.rows_received(link, [place for place, _ in rows], [text for _, text in rows])

    # ---- trouble

    @rule(
        data=st.data(),
        kind=st.sampled_from(["link", "link", "writer", "backup", "backup", "follower"]),
        over_soon=st.booleans(),
    )
    def make_trouble(self, data: st.DataObject, kind: str, over_soon: bool) -> None:
        """Cut a link, restart the writer or the follower, or restore an old backup of the writer.

        Other facts will get the tokens above a backup.
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
            return  # until the Reset is durable, a restart would forget it: no command names the restore
        for link in sorted(self.links):
            self.cut(link)
        if kind == "follower":
            self.cursor = self.new_cursor()
            self.last_asked = self.in_progress = self.early_page = None
            return
        if kind == "backup":
            self.settled = max(0, self.settled - data.draw(st.integers(0, 10)))
            self.too_long = {token for token in self.too_long if token <= self.settled}
            self.log = [fact for fact in self.log if fact.token <= self.settled]
            self.histories.append(self.log)
            self.restored = True
        self.published = self.settled

    def cut(self, link: str) -> None:
        del self.links[link]
        self.asked_on.discard(link)
        self.cursor.link_lost(link)

    # ---- the follower

    @precondition(lambda self: self.in_progress is None and self.cursor.step() is not None)
    @rule(data=st.data(), early=st.booleans())
    def begin_a_step(self, data: st.DataObject, early: bool) -> None:
        self.in_progress = self.cursor.step()
        if early and isinstance(self.in_progress, CatchUp):
            self.early_page = self.page(self.in_progress, data)

    @precondition(lambda self: self.in_progress is not None)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_a_step(self, data: st.DataObject, fails: bool) -> None:
        if fails:
            self.in_progress = self.early_page = None
            return
        if isinstance(self.in_progress, CatchUp):
            page = self.early_page or self.page(self.in_progress, data)
            try:
                self.cursor.fetched(self.in_progress, page)
            except CatchUpError:
                assert page.upto <= self.in_progress.after
        elif isinstance(self.in_progress, Check):
            self.check(self.in_progress)
        elif self.in_progress is not None:
            self.commit_step(self.in_progress)
        self.last_asked = self.in_progress = self.early_page = None

    @precondition(lambda self: self.in_progress is None)
    @rule(data=st.data(), steps=st.integers(1, 5))
    def do_some_steps(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            self.in_progress = self.cursor.step()
            self.end_a_step(data, fails=False)

    def commit_step(self, step: Apply | Reset) -> None:
        assert step.after == self.stored_position
        if isinstance(step, Reset):
            assert step.to < self.stored_position  # I3: only a Reset lowers it
            assert len(self.histories) > 1 or self.max_links > 1
            self.stored = [fact for fact in self.stored if fact.token <= step.to]
            self.stored_position = step.to
        else:
            assert is_ascending([step.after, *tokens_of(step.facts), Token(step.upto + 1)])  # I7
            assert step.after < step.upto  # I3
            self.stored += step.facts
            self.stored_position = step.upto
        self.cursor.applied(step)

    def check(self, step: Check) -> None:
        """Compare the histories."""
        raise NotImplementedError

    def page(self, step: CatchUp, data: st.DataObject) -> Page:
        """Return what a source may answer: whole facts, not all of them, and perhaps others too."""
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
        """Check I1, I2 and I4: all facts up to the position, each once and whole, of one history of the writer."""
        assert self.cursor.position == self.stored_position
        histories = ([fact for fact in log if fact.token <= self.stored_position] for log in self.histories)
        assert self.stored in histories

    @invariant()
    def memory_is_bounded(self) -> None:
        """Check I9."""
        cursor = self.cursor
        counted = fact_bytes(cursor._ready) + fact_bytes(cursor._held) + row_bytes(cursor._partial)
        assert cursor.held_bytes == counted
        assert counted <= MAX_HELD_BYTES + self.largest_page

    @invariant()
    def a_step_can_be_asked_for_again(self) -> None:
        step = self.cursor.step()
        assert step == self.cursor.step()
        assert self.cursor.live == (self.cursor.linked and step is None)
        if isinstance(step, Apply):
            assert len(step.facts) <= 1 or sum(len(fact.texts) for fact in step.facts) <= MAX_APPLY_ROWS
            if isinstance(self.last_asked, Apply) and self.last_asked.resets == step.resets:
                assert step.facts[: len(self.last_asked.facts)] == self.last_asked.facts
        self.last_asked = step

    @invariant()
    def a_live_follower_has_everything_that_was_published(self) -> None:
        if self.cursor.live and not any(self.links.values()) and not self.restored:
            assert self.stored_position >= self.published

    def teardown(self) -> None:
        """Without further faults, the follower gets all facts of the writer (I10)."""
        if isinstance(self.in_progress, Apply | Reset):
            self.commit_step(self.in_progress)
        self.links = self.links or {"the last": deque()}
        for wire in self.links.values():
            wire.append(position(self.published, self.published))
        self.publish()
        for link, wire in self.links.items():
            for each in wire:
                if isinstance(each, Position):
                    self.cursor.position_received(link, each.prev, each.new)
                else:
                    self.cursor.rows_received(link, [each[0]], [each[1]])
        for _ in range(1000):
            step = self.cursor.step()
            if step is None:
                break
            if isinstance(step, CatchUp):
                facts = [fact for fact in self.log if step.after < fact.token <= step.upto]
                self.cursor.fetched(step, Page(facts, step.upto, limited=False))
            elif isinstance(step, Check):
                self.check(step)
            else:
                self.commit_step(step)
        assert self.cursor.live
        assert self.stored == self.log
        assert self.cursor.position == self.cursor.published == self.settled


class CheckedLink(OneLink):
    """The same with histories: a restored writer may write more than was lost before the follower connects."""

    def __init__(self) -> None:
        super().__init__()
        self.history: History = [Epoch("first", Token(0), Token(0))]  # the writer's
        self.replaced: list[tuple[list[Fact], int, set[int], History]] = []  # databases that a backup replaced
        self.followed: History = ()  # in the follower's database

    def new_cursor(self) -> Cursor:
        return Cursor(
            self.stored_position, max_held_bytes=MAX_HELD_BYTES, max_apply_rows=MAX_APPLY_ROWS, checks_history=True
        )

    @precondition(lambda self: self.restored)
    @rule(facts=st.integers(1, 12))
    def write_after_a_restore(self, facts: int) -> None:
        for _ in range(facts):
            self.commit(rows=1)
        self.publish()

    @precondition(lambda self: not self.links and self.published == self.settled)
    @rule(behind=st.integers(0, 10))
    def connect_to_a_relay_that_is_behind(self, behind: int) -> None:
        """Begin below what was published, in the same history."""
        self.connect(asked=False)
        sent = max(0, self.published - behind)
        for wire in self.links.values():
            wire += [position(sent, sent), *self.lines_after(sent)]

    def break_something(self, data: st.DataObject, kind: str) -> None:
        if kind == "follower" and isinstance(self.cursor.step(), Reset):
            self.cut_all()
            self.cursor = self.new_cursor()
            self.last_asked = self.in_progress = self.early_page = None
            return
        if kind == "backup" and self.replaced and data.draw(st.booleans()):
            self.put_back(*data.draw(st.sampled_from(self.replaced)))
            return
        if kind == "backup":
            self.replaced.append(([*self.log], self.settled, {*self.too_long}, self.history))
        super().break_something(data, kind)
        if kind in ("writer", "backup"):
            of_backup = [each for each in self.history if each.start <= self.settled]
            epoch = Epoch(f"epoch {next(self.serials)}", Token(self.settled), Token(self.settled))
            self.history = begin_epoch(of_backup, epoch)

    def put_back(self, log: list[Fact], settled: int, too_long: set[int], history: History) -> None:
        """Put a database back that a backup had replaced."""
        self.cut_all()
        self.log, self.too_long, self.restored = [*log], {*too_long}, True
        self.settled = self.published = settled
        self.histories.append(self.log)
        epoch = Epoch(f"epoch {next(self.serials)}", Token(settled), Token(settled))
        self.history = begin_epoch(history, epoch)

    def cut_all(self) -> None:
        for link in sorted(self.links):
            self.cut(link)

    def page(self, step: CatchUp, data: st.DataObject) -> Page:
        """Return what a source may answer; before the next connection, a database that was exchanged does not."""
        if self.restored or not self.cursor.linked:
            return Page((), step.after, limited=False)
        return super().page(step, data)

    def check(self, step: Check) -> None:
        """Compare the histories; with the first one, what is applied is trusted."""
        common = step.after
        if self.followed:
            found = common_position(self.followed, self.history, step.upto)
            common = Token(0) if found is None else found  # --accept-new-history
        compared = self.cursor.compared(step, common, both_known=bool(self.followed))
        if compared:
            self.followed = self.history
            self.cursor.checked(step)
        elif self.followed and isinstance(undo := self.cursor.step(), Reset):
            assert undo.to == common, "the histories decide up to where facts are undone"


class TwoLinks(OneLink):
    """The same with two links to the writer at once."""

    max_links = 2


TestCheckedLink = CheckedLink.TestCase
TestOneLink = OneLink.TestCase
TestTwoLinks = TwoLinks.TestCase
