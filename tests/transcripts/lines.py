"""Valid and invalid lines of each command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.wire.commands import (
    ClearUserSync,
    Command,
    Error,
    FederationAck,
    Name,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    Server,
    UserIp,
    UserSync,
)
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

EVENTS, CACHES, MASTER = StreamName("events"), StreamName("caches"), InstanceName("master")
EV = '["ev",["$e:h","!r:h","m.room.message",null,null,null,null,false]]'

# docs/protocol/wire.md A5: the example lines, and the ends of what each word takes
VALID: list[tuple[str, Command]] = [
    ("SERVER localhost", Server("localhost")),
    ("SERVER ", Server("")),
    (f"RDATA events master 14 {EV}", Rdata(EVENTS, MASTER, Token(14), EV)),
    ("RDATA events master batch []", Rdata(EVENTS, MASTER, None, "[]")),
    ("RDATA events master -1 null", Rdata(EVENTS, MASTER, Token(-1), "null")),
    ('RDATA events master 1 ["a b", 1]', Rdata(EVENTS, MASTER, Token(1), '["a b", 1]')),
    ("RDATA events master 1  []", Rdata(EVENTS, MASTER, Token(1), " []")),
    ("POSITION events master 53 53", Position(EVENTS, MASTER, Token(53), Token(53))),
    ("POSITION events master 9 5", Position(EVENTS, MASTER, Token(9), Token(5))),
    ("ERROR Line length exceeded", Error("Line length exceeded")),
    ("PING 1490197665618", Ping("1490197665618")),
    ("PING ", Ping("")),
    ("PING  two  spaces ", Ping(" two  spaces ")),
    ("PING \x00", Ping("\x00")),
    ("NAME generic_worker1", Name("generic_worker1")),
    ("REPLICATE ", Replicate()),
    ("REPLICATE events caches", Replicate((EVENTS, CACHES))),
    ("USER_SYNC Qzxlk @u:example.com start 1490197665618", UserSync("Qzxlk", "@u:example.com", True, 1490197665618)),
    ("USER_SYNC Qzxlk @u:example.com end 0", UserSync("Qzxlk", "@u:example.com", False, 0)),
    ("CLEAR_USER_SYNC Qzxlk", ClearUserSync("Qzxlk")),
    ("FEDERATION_ACK federation_sender1 123", FederationAck(InstanceName("federation_sender1"), Token(123))),
    (
        'USER_IP @u:h ["tok","1.2.3.4","UA","DEV",1490197665618]',
        UserIp("@u:h", "tok", "1.2.3.4", "UA", "DEV", 1490197665618),
    ),
    ('USER_IP @u:h ["tok","::1","U A",null,0]', UserIp("@u:h", "tok", "::1", "U A", None, 0)),
    ("REMOTE_SERVER_UP example.com", RemoteServerUp("example.com")),
]

# parsed like the line before, although no program should send them
ALSO_READ: list[tuple[str, Command]] = [
    ("REPLICATE", Replicate()),
    ("REPLICATE\r", Replicate()),
    ("REPLICATE \r", Replicate()),
    ("REPLICATE  events   caches ", Replicate((EVENTS, CACHES))),
    ("PING", Ping("")),
    ("SERVER localhost\r", Server("localhost")),
    ("PING a\r\r", Ping("a\r")),
    ("POSITION events master 1 2\r", Position(EVENTS, MASTER, Token(1), Token(2))),
    ("RDATA events master 1 []\r", Rdata(EVENTS, MASTER, Token(1), "[]")),
    ('USER_IP @u:h [ "t", "i", "a", "d", 1 ]', UserIp("@u:h", "t", "i", "a", "d", 1)),
]

# Invalid lines, and a part of the error (docs/protocol/wire.md A2, docs/protocol/wire.md A3, docs/protocol/wire.md A5,
# docs/protocol/wire.md A6, docs/protocol/wire.md A7).
MALFORMED: list[tuple[str, str]] = [
    ("FOO bar", "unknown command: 'FOO'"),
    ("FOO 100%", "unknown command: 'FOO'"),
    ("GET /metrics HTTP/1.1\r", "unknown command: 'GET'; this is not an HTTP port"),
    ("ping 1", "unknown command: 'ping'"),
    (" PING 1", "unknown command: ''"),
    ("PING\t1", "unknown command: 'PING"),
    ("REPLICATE\r\r", "unknown command: 'REPLICATE"),
    ("x" * 5000, f"unknown command: '{'x' * 40}'"),
    ("INVALIDATE_CACHE a", "unknown command"),
    ("REMOVE_PUSHER a b c", "unknown command"),
    ('LOCK_RELEASED ["i","n","k"]', "unknown command"),
    ("NEW_ACTIVE_TASK abc", "unknown command"),
    ("RDATA", "RDATA takes"),
    ("RDATA ", "RDATA takes"),
    ("RDATA events", "RDATA takes"),
    ("RDATA events master", "RDATA takes"),
    ("RDATA events 14 []", "RDATA takes"),
    ("RDATA events master 14", "RDATA takes"),
    ("RDATA events master 14 ", "not JSON"),
    ("RDATA events  14 []", "not an instance name: ''"),
    ("RDATA  master 14 []", "not a stream name: ''"),
    ("RDATA events master  14 []", "not a plain integer of 64 bits: ''"),
    ("RDATA events master Batch []", "not a plain integer of 64 bits: 'Batch'"),
    ("RDATA events master 1_000 []", "not a plain integer of 64 bits: '1_000'"),
    ("RDATA events master +14 []", "not a plain integer of 64 bits: '+14'"),
    ("RDATA events master 014 []", "not a plain integer of 64 bits: '014'"),
    ("RDATA events master 14 [] []", "not JSON: Extra data at character 4 of 5"),
    ("RDATA events master 14 [NaN]", "not JSON: NaN is not JSON"),
    ("RDATA events master 14 [Infinity]", "not JSON: Infinity is not JSON"),
    ('RDATA events master 14 ["\x01"]', "not JSON: Invalid control character at"),
    ("RDATA events master 14 ['a']", "not JSON"),
    ("RDATA eve\x00nts master 14 []", "not a stream name"),
    ("RDATA events mas\u00a0ter 14 []", "not an instance name"),
    (f"RDATA {'s' * 256} master 14 []", "not a stream name"),
    ("POSITION events master 53", "POSITION takes"),
    ("POSITION events 53 53", "POSITION takes"),
    ("POSITION events master 53 53 53", "POSITION takes"),
    ("POSITION events master 53 53 ", "POSITION takes"),
    ("POSITION events master 53  53", "POSITION takes"),
    ("POSITION events master batch 53", "not a plain integer of 64 bits: 'batch'"),
    ("POSITION events master 53 batch", "not a plain integer of 64 bits: 'batch'"),
    ("POSITION events master 5.0 6", "not a plain integer of 64 bits: '5.0'"),
    (f"POSITION events master 1 {2**63}", "not a plain integer of 64 bits"),
    ("REPLICATE eve\x07nts", "not a stream name"),
    ("USER_SYNC i u stop 1", "USER_SYNC takes"),
    ("USER_SYNC i u Start 1", "USER_SYNC takes"),
    ("USER_SYNC i u start", "USER_SYNC takes"),
    ("USER_SYNC i u device start 1", "USER_SYNC takes"),
    ("USER_SYNC  u start 1", "USER_SYNC takes"),
    ("USER_SYNC i  start 1", "USER_SYNC takes"),
    ("USER_SYNC i u start x", "not a plain integer of 64 bits: 'x'"),
    ("FEDERATION_ACK 123", "FEDERATION_ACK takes"),
    ("FEDERATION_ACK a 123 4", "FEDERATION_ACK takes"),
    ("FEDERATION_ACK  123", "not an instance name: ''"),
    ("FEDERATION_ACK a b", "not a plain integer of 64 bits: 'b'"),
    ("USER_IP @u:h", "USER_IP takes"),
    ("USER_IP @u:h ", "not JSON"),
    ('USER_IP  ["t","i","a","d",1]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a","d"]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a","d",1,2]', "USER_IP takes"),
    ('USER_IP @u:h {"access_token":"t"}', "USER_IP takes"),
    ('USER_IP @u:h "tiadx"', "USER_IP takes"),
    ('USER_IP @u:h [null,"i","a","d",1]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a",5,1]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a","d",true]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a","d",false]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a","d",1.5]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a","d",1] x', "not JSON"),
    (f'USER_IP @u:h ["t","i","a","d",{2**63}]', "USER_IP takes"),
    ('USER_IP @u:h ["t","i","a","d",-1]', "USER_IP takes"),
]


def ids_of(examples: Sequence[tuple[object, object]], place: int = 0) -> list[str]:
    """Return test IDs without backslashes: pytest escapes those again at each collection, and mutmut collects twice."""
    return [ascii(example[place])[:40].replace("\\", "/") for example in examples]
