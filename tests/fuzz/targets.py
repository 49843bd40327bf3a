"""The targets of fuzzing, and the outcome that each of them allows.

A target is a module of this folder with a function ``check(data)``.  It passes ``data``, bytes that a peer or a file
may have, through an entrance of the package.  Only two outcomes are allowed: a value, or the error that the entrance
documents.  Anything else leaves ``check`` as an exception.  The runner limits the time and the memory of each call.

=========  ============================  ====================================================================
target     entrance                      what must hold, beside that
=========  ============================  ====================================================================
wire       LineBuffer, parse_line        an accepted line is encoded to itself; fast and slow parsers agree
session    ReplicationConnection         cuts change nothing; a Fault has a reason that ERROR can carry; rows
                                         decode; what USER_IP has is stored
redis      RedisConnection,              cuts change nothing; rows decode
           ChannelReader
http       ApiSite, with rooms           cuts change nothing; no answer is 500, and no failure is logged
pages      read_page, AddedLines         a page is encoded to itself; its rows decode
rows       grammar, typed streams        the two decoders agree; output has one line; access tokens are hidden
toml       config.load, sockets_of       no secret is shown
segments   SegmentReader, Archive        the facts are encoded to the same lines
manifests  read_manifest, histories      a manifest is encoded to itself; no name leaves the folder
tokens     tokens, places, retentions    what is read is encoded to what is read as the same
events     Event.read, persist           an event is stored whole or not at all; it can be read, and its rows
urls       Url, RedisPlace, endpoints    no password is shown
=========  ============================  ====================================================================
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT: Final = Path(__file__).parent.parent / "data" / "fuzz"  # a folder of inputs for each target
TARGETS: Final = (
    "wire",
    "session",
    "redis",
    "http",
    "pages",
    "rows",
    "toml",
    "segments",
    "manifests",
    "tokens",
    "events",
    "urls",
)


def load(target: str) -> Callable[[bytes], None]:
    """Import a target, and return its ``check``."""
    return cast("Callable[[bytes], None]", import_module(f"tests.fuzz.{target}_target").check)
