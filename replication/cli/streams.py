"""``replication streams``: are the tables fit that streams are mapped onto, and a trigger for who else writes there.

``check`` says what is wrong with each mapping, gathered streams among them, and the cure.  ``install`` has PostgreSQL
number each transaction before it draws an ID from a mapped table, so that who is under way costs nothing to tell;
``remove`` undoes that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication import config
from replication.cli.parser import Parser
from replication.storage.mappings import check, number_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.registry import StreamDefinition


def main(arguments: Sequence[str]) -> int:
    """Check, install or remove."""
    parser = Parser(prog="replication streams", description=__doc__)
    parser.add_argument("what", choices=("check", "install", "remove"), metavar="check|install|remove")
    parser.add_argument("--config", metavar="FILE", required=True, help="the master's configuration")
    parser.add_argument("--database", metavar="URL", help="instead of the one that it names")
    parser.add_argument("--stream", metavar="NAME", action="append", help="this one only; may be given several times")
    found = parser.parse_args(arguments)
    configured = config.load("master", found.config, {"database": found.database})
    checks = found.what == "check"
    mapped = [each for each in configured.streams if each.table is not None or (checks and each.tables)]
    chosen = [each for each in mapped if found.stream is None or each.name in found.stream]
    if unknown := [each for each in found.stream or () if each not in [stream.name for stream in mapped]]:
        parser.error(f"--stream {unknown[0]}: {found.config} maps no stream of that name onto a table")
    if not chosen:
        print(f"{found.config} maps no stream onto a table: there is nothing to {found.what}")
        return 0
    if checks:
        return _check(configured.database, chosen, configured.streams)
    tables = number_first(configured.database, chosen, remove=found.what == "remove")
    for table in tables:
        print(f"{table}: {'removed' if found.what == 'remove' else 'installed'}")
    return 0


def _check(database: str, streams: Sequence[StreamDefinition], beside: Sequence[StreamDefinition]) -> int:
    """Print what is to be said of ``streams``; 1 if one cannot work."""
    findings = check(database, streams, beside)
    if not findings:
        print("the streams are mapped onto tables of another kind of database: there is nothing to check")
    for finding in findings:
        for said in (finding.error, *finding.warnings) if finding.error else finding.warnings or ("ok",):
            print(f"{finding.stream}: {said}")
    return 1 if any(each.error for each in findings) else 0
