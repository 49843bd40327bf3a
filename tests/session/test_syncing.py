"""Who syncs where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replication.session.syncing import SyncingUsers
from replication.wire.commands import UserSync


class Told(SyncingUsers):
    """Keeps what it told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        super().__init__(lambda user_id, syncing: self.told.append(f"{'+' if syncing else '-'}{user_id}"))

    def say(self, text: str, now: float = 0.0) -> None:
        self.hear(UserSync.parse(text), now)


def test_a_user_syncs_from_the_first_process_to_the_last() -> None:
    users = Told()
    users.say("one @u start 5")
    users.say("two @u start 7")
    users.say("two @v start 8")
    users.say("one @u start 9")
    assert users.told == ["+@u", "+@v"]
    assert users.at("@u") == {"one": 9, "two": 7}
    assert users.processes() == {"one": {"@u": 9}, "two": {"@u": 7, "@v": 8}}
    users.say("one @u end 10")
    users.say("one @u end 10")
    users.say("three @u end 10")
    assert users.told == ["+@u", "+@v"]
    users.say("two @u end 11")
    assert users.told[2:] == ["-@u"]
    assert "@v" in users
    assert "@u" not in users
    assert len(users) == 1


def test_a_process_that_says_so_is_cleared() -> None:
    users = Told()
    users.say("one @u start 5")
    users.say("one @v start 5")
    users.say("two @u start 5")
    users.clear("one")
    users.clear("one")
    assert users.told[2:] == ["-@v"]
    users.clear("two")
    assert (users.told[3:], len(users), users.processes()) == (["-@u"], 0, {})


def test_trap_11_a_process_that_is_silent_for_five_minutes_is_cleared() -> None:
    users = Told()
    users.say("one @u start 5", 0.0)
    users.say("two @v start 5", 0.0)
    users.alive("one", 200.0)
    users.alive("one", 100.0)
    users.alive("unknown", 200.0)
    assert users.expire(299.0) == []
    assert users.expire(300.0) == ["two"]
    assert users.told[2:] == ["-@v"]
    users.say("one @w end 5", 250.0)
    assert users.expire(549.0) == []
    assert users.expire(550.0) == ["one"]
    assert len(users) == 0


@given(st.lists(st.tuples(st.sampled_from(["start", "end", "clear"]), st.sampled_from("ab"), st.sampled_from("uvw"))))
def test_what_was_told_is_who_syncs(steps: list[tuple[str, str, str]]) -> None:
    users, model = Told(), set[tuple[str, str]]()
    for what, process, user in steps:
        if what == "clear":
            users.clear(process)
            model = {each for each in model if each[0] != process}
        else:
            users.say(f"{process} {user} {what} 0")
            (model.add if what == "start" else model.discard)((process, user))
        syncing = {user for _, user in model}
        last = {said[1:]: said[0] for said in users.told}
        assert {user for user, sign in last.items() if sign == "+"} == syncing
        assert len(users) == len(syncing)
    told = [(said[1:], said[0]) for said in users.told]
    for user in "uvw":
        signs = [sign for who, sign in told if who == user]
        assert signs == (["+", "-"] * len(signs))[: len(signs)]
