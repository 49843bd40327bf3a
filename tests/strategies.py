"""Hypothesis strategies: names, tokens, rows, facts, commands, and bytes in reads of any size.

Everything they generate can be sent: its line is far shorter than the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from replication.streams.facts import Fact
from replication.wire import commands, grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy

TOKEN_MAX = 2**63 - 1

# Names that the wire accepts: anything without white space and control characters.
_names = st.one_of(
    st.sampled_from(["events", "caches", "backfill", "to_device", "master", "worker1", "batch", "RDATA", "%s"]),
    st.text(st.characters(exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), min_size=1, max_size=20),
)
stream_names: SearchStrategy[StreamName] = _names.map(StreamName)
instance_names: SearchStrategy[InstanceName] = _names.map(InstanceName)

# Names that can be declared: see streams.definitions.
declared_names: SearchStrategy[StreamName] = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.-]{0,15}\Z").map(StreamName)

# Tokens that the wire accepts, and tokens of this package's streams.
tokens: SearchStrategy[Token] = st.one_of(st.integers(-3, 20), st.integers(-(2**63), TOKEN_MAX)).map(Token)
positive_tokens: SearchStrategy[Token] = st.one_of(st.integers(1, 50), st.integers(1, TOKEN_MAX)).map(Token)

# The rest of a line: the argument of SERVER, NAME, ERROR, PING and REMOTE_SERVER_UP.
line_texts: SearchStrategy[str] = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=40)
    | st.sampled_from(["", " ", "localhost", "100% %s %(x)s", "1490197665618", "two  spaces "])
).filter(lambda text: not text.endswith("\r"))  # one CR at the end is dropped

# JSON values of an application's row, with lone surrogates, and their texts.
json_texts: SearchStrategy[str] = st.text(max_size=15) | st.sampled_from(['"', "\\", "\n", "\ud800", "é", "\x00", "😀"])
rows: SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | json_texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(json_texts, inner, max_size=4),
    max_leaves=8,
)
row_texts: SearchStrategy[str] = rows.map(grammar.encode_row)


@st.composite
def facts(draw: st.DrawFn, after: int = 0, max_size: int = 8, min_rows: int = 0) -> list[Fact]:
    """Draw facts of one writer: ascending tokens above ``after``, with gaps, each of ``min_rows`` to 4 rows."""
    steps = draw(st.lists(st.integers(1, 4), max_size=max_size))
    made = []
    for step in steps:
        after += step
        texts = draw(st.lists(row_texts, min_size=min_rows, max_size=4))
        made.append(Fact(Token(after), tuple(texts)))
    return made


_words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=" \n\r"), min_size=1, max_size=20)

servers = st.builds(commands.Server, line_texts)
rdatas = st.builds(commands.Rdata, stream_names, instance_names, st.none() | tokens, row_texts)
positions = st.builds(commands.Position, stream_names, instance_names, tokens, tokens)
errors = st.builds(commands.Error, line_texts)
pings = st.builds(commands.Ping, line_texts)
names = st.builds(commands.Name, line_texts)
replicates = st.builds(commands.Replicate, st.lists(stream_names, max_size=4).map(tuple))
user_syncs = st.builds(commands.UserSync, _words, _words, st.booleans(), tokens)
clear_user_syncs = st.builds(commands.ClearUserSync, line_texts)
federation_acks = st.builds(commands.FederationAck, instance_names, tokens)
user_ips = st.builds(
    commands.UserIp, _words, json_texts, json_texts, json_texts, st.none() | json_texts, st.integers(0, TOKEN_MAX)
)
remote_server_ups = st.builds(commands.RemoteServerUp, line_texts)

master_commands: SearchStrategy[commands.Command] = st.one_of(
    servers, rdatas, positions, errors, pings, remote_server_ups
)
worker_commands: SearchStrategy[commands.Command] = st.one_of(
    names, replicates, user_syncs, clear_user_syncs, federation_acks, user_ips, errors, pings, remote_server_ups
)
any_command: SearchStrategy[commands.Command] = master_commands | worker_commands


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Draw ``data`` in pieces, as reads from a socket might deliver it."""
    places: Sequence[int] = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
