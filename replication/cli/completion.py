"""``replication completion``: a script for bash, zsh or fish, by argcomplete.

At each TAB the script runs ``replication`` with the command line in the environment, and ``complete`` answers it.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

from argcomplete import autocomplete
from argcomplete.completers import BaseCompleter, DirectoriesCompleter, FilesCompleter
from argcomplete.shell_integration import shellcode

from replication.bench import SCENARIOS
from replication.cli.main import COMMANDS, load
from replication.cli.parser import Parser

if TYPE_CHECKING:
    from argparse import Action
    from collections.abc import Iterable, Sequence


def make_parser() -> Parser:
    """Return what reads the command line of ``replication completion``."""
    parser = Parser(
        prog="replication completion",
        description="Print a script that completes commands and options in a shell.",
        epilog='example, in ~/.bashrc: eval "$(replication completion bash)"',
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the script."""
    shell = make_parser().parse_args(arguments).shell
    print(shellcode(["replication"], use_defaults=False, shell=shell))
    return 0


def complete() -> None:
    """Send the shell what may follow in its command line, and end the process."""
    parser = ArgumentParser(prog="replication")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    words = os.environ["COMP_LINE"].split()
    for name, meaning in COMMANDS.items():
        parents = [load(name).make_parser()] if name in words else []
        commands.add_parser(name, help=meaning, parents=parents, add_help=False)
    autocomplete(parser, always_complete_options="long", default_completer=_Values(), print_suppressed=True)


class _Values(BaseCompleter):
    """The values of an argument without choices, by its metavar."""

    def __call__(self, *, prefix: str, action: Action, **_: Any) -> Iterable[str]:
        match action.metavar:
            case "FILE":
                return FilesCompleter()(prefix)
            case "DIR":
                return DirectoriesCompleter()(prefix)
            case "SCENARIO":
                return SCENARIOS
        return ()
