"""Both links to writers, over TCP and over Redis, have what a follower uses."""

from __future__ import annotations

from replication.net.client import WriterClient
from replication.net.links import IPeer, IWriterLink
from replication.net.protocol import Limits
from replication.net.redis import RedisClient
from replication.wire.grammar import InstanceName, StreamName
from tests.doubles import Net


def test_a_link_over_tcp_and_one_over_redis_have_the_same_interface() -> None:
    def ignore(*_: object) -> None:
        pass

    name = InstanceName("us")
    tcp: IWriterLink = WriterClient(
        reactor=Net(),
        endpoint="tcp:127.0.0.1:1",
        server_name="example.com",
        instance_name=name,
        streams=(),
        limits=Limits(),
        on_received=ignore,
        on_lost=ignore,
        on_fault=ignore,
    )
    redis: IWriterLink = RedisClient(
        reactor=Net(),
        url="redis://127.0.0.1:1",
        channel="example.com",
        instance_name=name,
        wants=lambda _: True,
        on_received=ignore,
        on_lost=ignore,
        on_fault=ignore,
    )
    for link in (tcp, redis):
        assert (link.state, link.connections, link.greeted, link.error, link.peer) == (
            "not connected",
            0,
            False,
            None,
            None,
        )
        link.pause_reading()
        link.resume_reading()
        link.request_positions()
    for stream, may in (("events", False), ("typing", True)):
        assert tcp.can_go_back(StreamName(stream))
        assert redis.can_go_back(StreamName(stream)) is may
        assert not tcp.begins_again(StreamName(stream))
        assert redis.begins_again(StreamName(stream)) is may


def test_a_peer_is_what_functions_of_on_command_receive() -> None:
    assert {each for each in vars(IPeer) if not each.startswith("_")} == {"name", "address", "send", "status"}
