"""Which users sync at which process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replication.presence.syncing import SyncingUsers
from replication.wire.commands import UserSync


class Recorded(SyncingUsers):
    """Keeps what it changes."""

    def __init__(self, **options: int) -> None:
        self.changes: list[str] = []
        super().__init__(lambda user_id, syncing: self.changes.append(f"{'+' if syncing else '-'}{user_id}"), **options)

    def send(self, text: str, now: float = 0.0) -> None:
        self.receive(UserSync.parse(text), now)


def test_a_user_syncs_from_the_first_process_to_the_last() -> None:
    users = Recorded()
    users.send("one @u start 5")
    users.send("two @u start 7")
    users.send("two @v start 8")
    users.send("one @u start 9")
    assert users.changes == ["+@u", "+@v"]
    assert users.processes() == {"one": {"@u": 9}, "two": {"@u": 7, "@v": 8}}
    users.send("one @u end 10")
    users.send("one @u end 10")
    users.send("three @u end 10")
    assert users.changes == ["+@u", "+@v"]
    users.send("two @u end 11")
    assert users.changes[2:] == ["-@u"]
    assert "@v" in users
    assert "@u" not in users
    assert len(users) == 1


def test_a_million_users_take_bounded_memory_and_the_rest_do_not_count() -> None:
    users = Recorded(max_bytes=100_000)
    for number in range(1_000):
        users.send(f"p{number} @user{number} start 5")
    most = len(users)
    assert 300 < most < 600
    assert users.refused == 1_000 - most
    users.send("p0 @user0 start 9")  # it counts already
    assert users.refused == 1_000 - most
    users.clear("p0")
    users.send("new @user start 5")
    assert "@user" in users
    for number in range(1_000):
        users.send(f"p{number} @user{number} end 5")
    users.send("new @user end 5")
    assert (len(users), users._bytes, users.processes()) == (0, 0, {})


def test_one_user_at_many_processes_takes_memory_at_each() -> None:
    users = Recorded(max_bytes=100_000)
    for number in range(1_000):
        users.send(f"p{number} @user start 5")
    assert len(users.processes()) == 1_000 - users.refused < 600
    assert users.changes == ["+@user"]


def test_a_user_in_doubt_is_removed_300_s_after_the_first_new_connection_that_does_not_name_it() -> None:
    users = Recorded()
    users.doubt("one", 0.0)
    users.send("one @u start 5")
    users.send("one @v start 6")
    users.doubt("one", 100.0)
    users.send("one @u start 7", 100.0)
    users.doubt("one", 300.0)
    assert users.expire_doubted(399.0) == []
    assert users.expire_doubted(400.0) == [UserSync("one", "@v", syncing=False, last_sync_ms=6)]
    users.send("one @u start 8", 401.0)
    assert users.expire_doubted(900.0) == []
    users.doubt("one", 900.0)
    users.send("one @u end 9", 901.0)
    assert users.changes == ["+@u", "+@v", "-@v", "-@u"]
    assert users.expire_doubted(1_900.0) == []


def test_clear_removes_all_users_of_a_process() -> None:
    users = Recorded()
    users.send("one @u start 5")
    users.send("one @v start 5")
    users.send("two @u start 5")
    users.clear("one")
    users.clear("one")
    assert users.changes[2:] == ["-@v"]
    users.clear("two")
    assert (users.changes[3:], len(users), users.processes()) == (["-@u"], 0, {})


def test_trap_11_a_process_that_is_silent_for_300_s_is_cleared() -> None:
    users = Recorded()
    users.send("one @u start 5", 0.0)
    users.send("two @v start 5", 0.0)
    users.alive("one", 200.0)
    users.alive("one", 100.0)
    users.alive("unknown", 200.0)
    assert users.expire(299.0) == []
    assert users.expire(300.0) == ["two"]
    assert users.changes[2:] == ["-@v"]
    users.send("one @w end 5", 250.0)
    assert users.expire(549.0) == []
    assert users.expire(550.0) == ["one"]
    assert len(users) == 0


@given(st.lists(st.tuples(st.sampled_from(["start", "end", "clear"]), st.sampled_from("ab"), st.sampled_from("uvw"))))
def test_the_changes_add_up_to_the_users_that_sync(steps: list[tuple[str, str, str]]) -> None:
    users, model = Recorded(), set[tuple[str, str]]()
    for what, process, user in steps:
        if what == "clear":
            users.clear(process)
            model = {each for each in model if each[0] != process}
        else:
            users.send(f"{process} {user} {what} 0")
            (model.add if what == "start" else model.discard)((process, user))
        syncing = {user for _, user in model}
        last = {each[1:]: each[0] for each in users.changes}
        assert {user for user, sign in last.items() if sign == "+"} == syncing
        assert len(users) == len(syncing)
    changes = [(each[1:], each[0]) for each in users.changes]
    for user in "uvw":
        signs = [sign for who, sign in changes if who == user]
        assert signs == (["+", "-"] * len(signs))[: len(signs)]
