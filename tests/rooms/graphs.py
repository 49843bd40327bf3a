"""Random graphs, event by event, and the expected results, computed from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from hypothesis import strategies as st

from replication.rooms.event import Event

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replication.rooms.event import StateKey

ROOM = "!r:far.test"
ACTIONS = ("grow", "grow", "grow", "merge", "soft", "reject", "outlier", "hole", "fill", "again")


@attrs.frozen
class Step:
    """One event, live or backfilled."""

    event: Event
    backfilled: bool = False


@st.composite
def graphs(draw: st.DrawFn, most: int = 25) -> list[Step]:
    """Return steps: forks, merges, state, de-outliering, soft failures, rejections, gaps and backfill."""
    steps: list[Step] = []
    sources: dict[str, dict[str, Any]] = {}
    outliers: list[str] = []
    holes: list[str] = []
    known: list[str] = []  # not outliers: what others may follow without more ado

    def add_step(name: str, *, backfilled: bool = False, **more: Any) -> None:
        steps.append(Step(Event.read(ROOM, {**sources[name], **more}), backfilled))

    def make(prevs: list[str]) -> str:
        name = f"e{len(sources)}"
        depth = 1 + max([sources[each]["depth"] for each in prevs], default=0)
        sources[name] = {
            "event_id": name,
            "type": "note",
            "sender": "@far:away",
            "depth": depth,
            "prev_event_ids": prevs,
        }
        if draw(st.booleans()):
            sources[name]["state_key"] = draw(st.sampled_from("abc"))
        return name

    add_step(make([]))
    known.append("e0")
    for _ in range(draw(st.integers(1, most))):
        action = draw(
            st.sampled_from(["grow", "grow", "grow", "merge", "soft", "reject", "outlier", "hole", "fill", "again"])
        )
        count = 1 if action != "merge" else draw(st.integers(2, 4))
        prevs = draw(st.lists(st.sampled_from(known[-8:]), min_size=1, max_size=count, unique=True))
        if action == "hole":  # a good event is missing, and the next one brings the state before it
            hole = make(prevs)
            sources[hole].pop("state_key", None)  # while it is missing, its key cannot be compared
            holes.append(hole)
            state = state_before(sources, hole) | own(sources[hole])
            above = make([hole])
            add_step(above, state_before=[[*key, each] for key, each in sorted(state.items())])
            known.append(above)
        elif action == "outlier":
            name = make(prevs)
            outliers.append(name)
            add_step(name, outlier=True)
        elif action == "fill" and (holes or outliers):
            name = draw(st.sampled_from(sorted(holes + outliers)))
            was_hole = name in holes
            (holes if was_hole else outliers).remove(name)
            add_step(name, backfilled=was_hole or draw(st.booleans()))
            known.append(name)
        elif action == "again":
            name = draw(st.sampled_from(known))
            ordinary = [each.event for each in steps if each.event.event_id == name and not each.event.outlier]
            steps.append(Step(ordinary[0], backfilled=True))
        else:
            name = make(prevs)
            if action == "soft":
                sources[name]["soft_failed"] = True
            if action == "reject":
                sources[name]["rejected"] = "no"
            add_step(name)
            known.append(name)
    return steps


def own(source: dict[str, Any]) -> dict[StateKey, str]:
    """Return the key and ID that an event adds to the state."""
    if "state_key" not in source or source.get("rejected"):
        return {}
    return {(source["type"], source["state_key"]): source["event_id"]}


def state_before(sources: dict[str, dict[str, Any]], name: str) -> dict[StateKey, str]:
    """Return the state before an event, from the first event on; branches are resolved by depth, then by ID."""
    if "given" in sources[name]:  # it came along, for what is before it is missing
        return dict(sources[name]["given"])
    after = [state_before(sources, prev) | own(sources[prev]) for prev in sources[name]["prev_event_ids"]]
    state: dict[StateKey, str] = {}
    for key in {key for each in after for key in each}:
        candidates = {each[key] for each in after if key in each}
        state[key] = max(candidates, key=lambda it: (sources[it]["depth"], it))
    return state


def sources_of(steps: Iterable[Step]) -> dict[str, dict[str, Any]]:
    """Return every event in its final form."""
    found: dict[str, dict[str, Any]] = {}
    for step in steps:
        event = step.event
        found[event.event_id] = {
            "event_id": event.event_id,
            "type": event.type,
            "depth": event.depth,
            "prev_event_ids": event.prev_event_ids,
            "rejected": event.rejected,
            **({} if event.state_key is None else {"state_key": event.state_key}),
            **({} if event.state_before is None else {"given": [(tuple(it[:2]), it[2]) for it in event.state_before]}),
        }
    return found


def forward_of(steps: Iterable[Step]) -> set[str]:
    """Return the forward extremities, from scratch; the last step must be live."""
    final: dict[str, Event] = {}
    lived: set[str] = set()
    for step in steps:
        known = final.get(step.event.event_id)
        if known is None or (known.outlier and not step.event.outlier):
            final[step.event.event_id] = step.event
            if not step.backfilled and step.event.is_good:
                lived.add(step.event.event_id)
    good = {each.event_id for each in final.values() if each.is_good}
    named = {prev for each in good for prev in final[each].prev_event_ids}
    edge = {prev for each in lived for prev in final[each].prev_event_ids}
    passed: set[str] = set()  # apart from what is named: a good event may name a soft-failed one that is passed later
    while edge:
        bad = [each for each in edge if each in final and final[each].soft_failed and not final[each].outlier]
        edge = {prev for each in bad for prev in final[each].prev_event_ids} - passed
        passed |= edge
    return lived - named - passed


def backward_of(steps: Iterable[Step]) -> set[str]:
    """Return the backward extremities, from scratch: missing events that ordinary events name."""
    here: set[str] = set()
    named: set[str] = set()
    for step in steps:
        if not step.event.outlier:
            here.add(step.event.event_id)
            if step.event.rejected is None:
                named |= set(step.event.prev_event_ids)
    return named - here
