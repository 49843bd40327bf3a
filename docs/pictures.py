"""The pictures and tables of ``architecture.md``, made from the code: ``python docs/pictures.py`` writes them anew.

A picture stands between ``<!-- picture: NAME -->`` and ``<!-- end -->``; tests/docs/test_pictures.py fails if one is
not what the code is.  Packages, their sentences and the arrows between them are read from the modules.  The ways of a
fact, a page and a segment are lists of functions in this file.  Each function must exist and name the next one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "replication"
PAGE = Path(__file__).parent / "architecture.md"
_MARKED = re.compile(r"(<!-- picture: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class PictureError(Exception):
    """The code is not as a picture has it; the message names the place."""


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a module, parsed."""
    return ast.parse(path.read_text(encoding="utf-8"))


def first_sentence(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the first sentence of a docstring, in Markdown."""
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    text = " ".join(re.sub(r":\w+:`([^`]+)`", r"`\1`", paragraph.replace("``", "`")).split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0].replace("|", "\\|")


# ---- the packages


def boxes() -> dict[str, Path]:
    """Return what lies at the first level of the package: packages, and single modules."""
    packages = {each.parent.name: each for each in PACKAGE.glob("*/__init__.py")}
    modules = {each.stem: each for each in PACKAGE.glob("*.py") if each.stem != "__init__"}
    return dict(sorted({**packages, **modules}.items()))


def arrows() -> dict[str, set[str]]:
    """Return, for each box, the boxes that it imports from."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    known = boxes()
    for path in PACKAGE.rglob("*.py"):
        source = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(tree_of(path)):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "replication":
                below = (node.module or "").split(".")[1:2]
                names = below or [each.name for each in node.names]
            elif isinstance(node, ast.Import):
                names = [each.name.split(".")[1] for each in node.names if each.name.startswith("replication.")]
            elif isinstance(node, ast.Constant) and is_module(str(node.value)):
                names = [str(node.value).split(".")[1]]  # imported by its name when it is needed
            found[source] |= {each for each in names if each in known and each != source}
    return {name: found[name] for name in known}


def is_module(name: str) -> bool:
    """Whether a text is the name of a module of the package."""
    return bool(re.fullmatch(r"replication(\.\w+)+", name)) and (ROOT / f"{name.replace('.', '/')}.py").exists()


def layers() -> list[list[str]]:
    """Return the layers that setup.cfg allows, the highest first."""
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    block = re.search(r"\nlayers =\n((?: {4}.+\n)+)", text)
    if block is None:
        raise PictureError("setup.cfg has no layers")
    return [line.split(" | ") for line in (each.strip() for each in block[1].splitlines())]


def draw_packages() -> str:
    """Return the graph of the boxes; an arrow that a longer way implies is left out."""
    direct = arrows()

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(each) for each in direct[name]))

    lines = ["```mermaid", "flowchart TD"]
    for layer in layers():
        lines += [f'    {name}["{name}"]' for name in layer]
    for name, targets in direct.items():
        implied = {each for other in targets for each in reached(other) - {other}}
        lines += [f"    {name} --> {each}" for each in sorted(targets - implied)]
    return "\n".join([*lines, "```"])


def list_packages() -> str:
    """Return a table of the boxes, the highest first."""
    found = boxes()
    lines = ["| package or module | job | imports from |", "| --- | --- | --- |"]
    direct = arrows()
    for name in [each for layer in layers() for each in layer]:
        path = found[name]
        place = f"`{name}/`" if path.name == "__init__.py" else f"`{name}.py`"
        lines.append(f"| {place} | {first_sentence(tree_of(path))} | {', '.join(sorted(direct[name])) or 'nothing'} |")
    return "\n".join(lines)


# ---- ways

# A step is "module:qualified.name", as in "writer/stream.py:StreamWriter.append".  The code of a step must have the
# name of the next one, or what stands after " > ".  What stands after " = " is written on the arrow; where there is
# only that, the next step is reached in another way (a reply, the network, code of the application).  A line "# name"
# begins the part of another process.
WAYS: dict[str, list[str]] = {
    "fact": [
        "# writer",
        "writer/stream.py:StreamWriter.reserve > FactTransaction = async with",
        "writer/reservation.py:FactTransaction.begin > _hold",
        "writer/publisher.py:PublishedStream.reserve",
        "streams/ids.py:StreamIds.reserve = your block runs",
        "writer/reservation.py:Reservation.write = your block ends",
        "writer/reservation.py:FactTransaction.commit",
        "storage/store.py:SqlStore.commit = durable",
        "writer/publisher.py:PublishedStream.complete",
        "writer/publisher.py:Publisher.publish > release",
        "streams/reorder_buffer.py:ReorderBuffer.release = every smaller ID is complete",
        "writer/publisher.py:Publisher._send",
        "writer/publisher.py:encode_within",
        "session/encoder.py:encode_facts = lines",
        "net/broadcast.py:Broadcast.publish > flush = the end of the reactor turn",
        "net/broadcast.py:Broadcast.flush > write",
        "net/protocol.py:ReplicationProtocol.write = the wire",
        "# follower",
        "net/protocol.py:ReplicationProtocol.dataReceived > _receive",
        "net/protocol.py:ReplicationProtocol._receive",
        "session/connection.py:ReplicationConnection.receive_data = commands",
        "net/client.py:WriterClient.commands_received > _pass_on",
        "follower/streams.py:FollowedStreams.received > _rows_received",
        "follower/stream.py:StreamFollower.rows_received",
        "streams/cursor.py:Cursor.rows_received = the next step",
        "follower/stream.py:StreamFollower._apply",
        "follower/application.py:Application.apply = your function, then the position",
        "storage/transactions.py:Transaction.commit = stored",
        "streams/cursor.py:Cursor.applied = the position has moved",
        "follower/waiters.py:PositionWaiters.moved",
    ],
    "page": [
        "# follower",
        "streams/cursor.py:Cursor.step = a gap",
        "follower/stream.py:StreamFollower._catch_up > _fetch",
        "follower/missed_facts.py:MissedFacts.fetch > fetch",
        "follower/catch_up.py:CatchUpSources.fetch > page",
        "web/client.py:HttpCatchUp.facts = HTTP",
        "# writer",
        "web/facts.py:read_updates",
        "writer/served.py:WrittenStreams.page",
        "writer/publisher.py:Publisher.page > facts",
        "storage/store.py:SqlStore.facts = facts",
        "web/pages.py:encode_page = HTTP",
        "# follower again",
        "web/pages.py:read_page = facts",
        "streams/cursor.py:Cursor.fetched = the next step",
        "follower/stream.py:StreamFollower._apply",
    ],
    "segment": [
        "# replication replay",
        "cli/replay.py:main > _replay",
        "segments/run.py:start_run > _plan",
        "segments/run.py:plan_ranges = one task for each range",
        "# a worker of Spark, or the same process",
        "segments/run.py:Task.do",
        "segments/export.py:export_range = rows in Arrow columns",
        "segments/export.py:LineEncoder.encode = files and receipts below .replay/",
        "# replication replay, at the end",
        "segments/run.py:Run.finish",
        "segments/manifest.py:write_manifest = the segments count",
        "# follower",
        "segments/archive.py:Archive.page",
    ],
}


def find(step: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """Return the function of a step."""
    module, _, name = step.partition(":")
    path = PACKAGE / module
    if not path.exists():
        raise PictureError(f"{step}: there is no such module")
    node: ast.AST = tree_of(path)
    for part in name.split("."):
        below = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part]
        if not below:
            raise PictureError(f"{step}: there is no {part}")
        node = below[-1]  # the first ones may be overloads
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise PictureError(f"{step}: {name} is no function")
    return node


def draw_way(name: str) -> str:
    """Return a picture and a table of a way, after checking that each step leads to the next."""
    picture, table = ["```mermaid", "flowchart TD"], ["| step | where | what it does |", "| --- | --- | --- |"]
    edges: list[str] = []
    processes, number, arrow = 0, 0, ""
    wanted: str | None = None  # what the step before must have led to
    before: ast.AST | None = None
    for line in WAYS[name]:
        if line.startswith("# "):
            if processes:
                picture.append("    end")
            processes += 1
            picture.append(f'    subgraph p{processes}["{line[2:]}"]')
            continue
        rest, _, word = line.partition(" = ")
        step, _, text = rest.strip().partition(" > ")
        module, _, function = step.partition(":")
        node = find(step)
        short = function.rpartition(".")[2]
        if before is not None and not re.search(rf"\b{re.escape(wanted or short)}\b", ast.unparse(before)):
            raise PictureError(f"the step before {step} does not name {wanted or short}: correct WAYS of {name!r}")
        number += 1
        if number > 1:
            edges.append(f"    s{number - 1} -->{arrow} s{number}")
        picture.append(f'    s{number}["{number}. {function}<br/>{module}"]')
        table.append(f"| {number} | `{function}` in `{module}` | {first_sentence(node) or '-'} |")
        arrow = f"|{word}|" if word else ""
        wanted, before = text, None if word and not text else node
    if processes:
        picture.append("    end")
    return "\n".join([*picture, *edges, "```", "", *table])


def draw(name: str) -> str:
    """Return the picture or table of a name."""
    made = {"packages": draw_packages, "jobs": list_packages}
    return made[name]() if name in made else draw_way(name)


def fill(text: str) -> str:
    """Return the page with its pictures as the code is now."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{draw(found[2])}\n\n{found[3]}", text)


def main() -> int:
    """Write the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    filled = fill(text)
    PAGE.write_text(filled, encoding="utf-8")
    sys.stdout.write(f"docs/architecture.md: {'nothing has changed' if filled == text else 'written'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
