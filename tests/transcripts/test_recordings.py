"""The recordings of Synapse 1.47 and its worker, parsed and encoded in both roles."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from replication.session.connection import Fault, ReplicationConnection, Role, Rows
from replication.wire.commands import Command, Position, Rdata
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.transcripts.recordings import RECORDINGS, read_recording

if TYPE_CHECKING:
    from replication.session.connection import Received

SINGLE = 100_000  # bytes of a recording that are read one by one; the rest is read at once


def encode_again(sender: ReplicationConnection, received: list[Received]) -> bytes:
    commands: list[Command] = []
    for each in received:
        assert not isinstance(each, Fault), each
        if isinstance(each, Rows):
            commands += [Rdata(each.stream, each.instance, *row) for row in zip(each.places, each.texts, strict=True)]
        else:
            commands.append(each)
    return b"".join(sender.send(command, 0.0) for command in commands)


def reads_of(data: bytes, cut: str) -> list[bytes]:
    if cut == "whole":
        return [data]
    if cut == "1 byte":
        return [*(data[at : at + 1] for at in range(min(len(data), SINGLE))), data[SINGLE:]]
    chance = random.Random(cut)  # the same cuts each time
    places = sorted(chance.choices(range(len(data)), k=max(3, len(data) // 700)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize("cut", ["whole", "1 byte", "random 1", "random 2"])
@pytest.mark.parametrize(("name", "role"), RECORDINGS)
def test_a_recording_is_parsed_without_a_fault_and_encoded_to_the_same_bytes(name: str, role: Role, cut: str) -> None:
    data = read_recording(name)
    receiver, sender = ReplicationConnection(role.other, 0.0), ReplicationConnection(role, 0.0)
    received = [each for read in reads_of(data, cut) for each in receiver.receive_data(read, 0.0)]
    assert encode_again(sender, received) == data
    assert receiver.lines_received == data.count(b"\n")


@pytest.mark.parametrize(("name", "role"), RECORDINGS)
def test_a_recording_is_parsed_the_same_line_by_line(name: str, role: Role) -> None:
    data = read_recording(name)
    receiver, sender = ReplicationConnection(role.other, 0.0), ReplicationConnection(role, 0.0)
    received = [each for line in data.splitlines() for each in receiver.receive_line(line, 0.0)]
    assert encode_again(sender, received) == data


@pytest.mark.parametrize(("name", "role"), RECORDINGS)
def test_a_recording_in_the_wrong_direction_is_one_fault(name: str, role: Role) -> None:
    received = ReplicationConnection(role, 0.0).receive_data(read_recording(name), 0.0)
    assert [type(each) for each in received] == [Fault]


@pytest.mark.parametrize(("name", "rows"), [("synapse-sqlite", 6263), ("synapse-postgres", 7013)])
def test_a_recording_has_the_numbers_of_rows_that_were_counted(name: str, rows: int) -> None:
    receiver = ReplicationConnection(Role.WORKER, 0.0)
    received = receiver.receive_data(read_recording(f"{name}/recording.txt"), 0.0)
    runs = [each for each in received if isinstance(each, Rows)]
    assert sum(len(run.texts) for run in runs) == rows
    assert {run.instance for run in runs} == {"master"}
    counts = Counter(type(each).__name__ for each in received)
    assert counts["Server"] == 1
    assert counts["Position"] % 16 == 0
    first = next(each for each in received if isinstance(each, Position))
    assert first == Position(StreamName("events"), InstanceName("master"), Token(1), Token(1))
