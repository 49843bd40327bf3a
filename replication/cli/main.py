"""``replication COMMAND``: which command it is, and how it ends.

Exit status 0: done; 1: failed, with one line on standard error that says what and what to do; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from replication import __version__
from replication.cli.parser import Parser
from replication.errors import ReplicationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Each is a module with main(arguments) -> exit status, imported when it is asked for.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "tail": ("replication.cli.tail", "print facts as they come"),
    "append": ("replication.cli.append", "append rows to a stream"),
    "status": ("replication.cli.status", "show streams, writers, positions and connections"),
    "streams": ("replication.cli.streams", "check tables that streams are mapped onto"),
    "replay": ("replication.cli.replay", "write history as segments, on Spark"),
    "rooms": ("replication.cli.rooms", "show a room, or draw its graph"),
    "bench": ("replication.bench", "measure this machine"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    listing = "\n".join(f"  {name:8} {meaning}" for name, (_, meaning) in COMMANDS.items())
    parser = Parser(
        prog="replication",
        usage="replication COMMAND …",
        description=f"commands:\n{listing}\n\nreplication COMMAND --help explains each.",
        epilog="The daemons are `twistd replication master` and `twistd replication worker`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"replication {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    module = import_module(COMMANDS[found.command][0])
    try:
        status: int = module.main(found.rest)
    except ReplicationError as error:
        status = _fail(found.command, str(error))
    except KeyboardInterrupt:
        status = 1
    except BrokenPipeError:
        status = 0  # whoever reads our output has had enough
    except OSError as error:
        status = _fail(found.command, str(error))
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush would complain
        if status == 0 and not isinstance(error, BrokenPipeError):
            status = _fail(found.command, f"cannot write to standard output: {error.strerror}")
    return status


def _fail(command: str, text: str) -> int:
    print(f"replication {command}: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
