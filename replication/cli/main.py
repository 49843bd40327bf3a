"""``replication COMMAND``: runs a command, and turns its errors into an exit status (docs/command-line.md).

Exit status 0: done; 1: failed, with one line on standard error that has the reason and the cure; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

from replication import __version__
from replication.cli.output import report
from replication.cli.parser import Parser
from replication.errors import ReplicationError
from replication.urls import hide_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

# Each is a module of this package with make_parser() and main(arguments) -> exit status, imported at first use.
COMMANDS: Final[Mapping[str, str]] = {
    "tail": "print facts as they come",
    "append": "append rows to a stream",
    "status": "show streams, writers, positions and connections",
    "skip": "leave out a fact that a worker's function cannot take",
    "retry": "apply a fact that was left out",
    "skipped": "list the facts that a worker has left out",
    "doctor": "find what is wrong, and name the cure",
    "streams": "check tables that streams are mapped onto",
    "replay": "write history as segments, on Spark",
    "rooms": "show a room, or draw its graph",
    "certs": "make an authority and certificates for TLS",
    "bench": "measure this machine",
    "simulate": "run masters and workers with faults, from seeds",
    "completion": "print a script that completes commands and options in a shell",
}


def load(command: str) -> ModuleType:
    """Import the module of a command."""
    return import_module(f"replication.cli.{command}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without any argument, show the commands and return 2."""
    if "_ARGCOMPLETE" in os.environ:
        load("completion").complete()  # a shell requests completions
    if arguments is None:
        _open_standard_files()
        arguments = sys.argv[1:]
        hide_arguments()
        if isinstance(sys.stdout, TextIOWrapper):  # its encoding, if not UTF-8, lacks characters
            sys.stdout.reconfigure(errors="backslashreplace")
    listing = "\n".join(f"  {name:10} {meaning}" for name, meaning in COMMANDS.items())
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
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    found = parser.parse_args(arguments)
    try:
        status: int = load(found.command).main(found.rest)
    except ReplicationError as error:
        status = _fail(found.command, str(error))
    except KeyboardInterrupt:
        status = 1
    except BrokenPipeError:
        status = 0  # the reader of the output has closed it
    except OSError as error:
        status = _fail(found.command, str(error))
    except UnicodeEncodeError:  # it is not shown: it may be a URL with a password
        status = _fail(
            found.command, "an argument is not text: write it in the encoding of the locale, UTF-8 if possible"
        )
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush would complain
        if status == 0 and not isinstance(error, BrokenPipeError):
            status = _fail(found.command, f"cannot write to standard output: {error.strerror}")
    return status


def _open_standard_files() -> None:
    """Open ``/dev/null`` for each closed standard file, which is None in Python; a socket would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 (until the end)


def _fail(command: str, text: str) -> int:
    report(f"replication {command}: {text}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
