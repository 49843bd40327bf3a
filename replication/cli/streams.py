"""``replication streams``: check the tables that streams are mapped onto, or install a trigger on them.

``check`` prints what is wrong with each mapping, and the cure.  ``install`` makes PostgreSQL give a transaction its
number before it allocates an ID from a mapped table: a poll then finds transactions in progress at little cost.
``remove`` undoes that (docs/operations.md, Mapped tables).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication import config
from replication.cli.output import write_line
from replication.cli.parser import Parser
from replication.errors import did_you_mean
from replication.storage.mapping_checks import check, install_trigger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.definitions import StreamDefinition
    from replication.urls import Url


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication streams",
        description="Check the tables that streams are mapped onto, or install a trigger on them (PostgreSQL).",
        epilog="With the trigger, a transaction that inserts by plain SQL has a number before it allocates an ID.",
    )
    parser.add_argument(
        "what",
        choices=("check", "install", "remove"),
        metavar="check|install|remove",
        help="print what is wrong with each mapping; install the trigger; remove it",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="the master's TOML file")
    parser.add_argument("--database", metavar="URL", help="another database than the file's")
    parser.add_argument("--stream", metavar="NAME", action="append", help="this stream only; may be repeated")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Check mappings, or install or remove the trigger."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    configured = config.load("master", found.config, {"database": found.database})
    checks = found.what == "check"
    mapped = [each for each in configured.streams if each.table is not None or (checks and each.tables)]
    chosen = [each for each in mapped if found.stream is None or each.name in found.stream]
    if unknown := [each for each in found.stream or () if each not in [stream.name for stream in mapped]]:
        near = did_you_mean(unknown[0], [each.name for each in mapped])
        parser.error(f"--stream {unknown[0]}: {found.config} maps no stream of that name onto a table{near}")
    if not chosen:
        write_line(f"{found.config} maps no stream onto a table: there is nothing to {found.what}")
        return 0
    if checks:
        return _check(configured.database, chosen, configured.streams)
    tables = install_trigger(configured.database, chosen, remove=found.what == "remove")
    for table in tables:
        write_line(f"{table}: {'removed' if found.what == 'remove' else 'installed'}")
    return 0


def _check(database: Url, streams: Sequence[StreamDefinition], declared: Sequence[StreamDefinition]) -> int:
    """Print the findings about ``streams``, and return 1 if one of them cannot work."""
    findings = check(database, streams, declared)
    if not findings:
        write_line("the streams are mapped onto tables of another kind of database: there is nothing to check")
    for finding in findings:
        for line in (finding.error, *finding.warnings) if finding.error else finding.warnings or ("ok",):
            write_line(f"{finding.stream}: {line}")
    return 1 if any(each.error for each in findings) else 0
