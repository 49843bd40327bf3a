"""Tests of the metadata of an event."""

from __future__ import annotations

import attrs

from replication.rooms.interfaces import EventMetadata


def test_only_an_ordinary_accepted_event_is_good() -> None:
    good = EventMetadata("$e", "!r", 1, 2, outlier=False, rejected=None, soft_failed=False, state_group=1)
    assert good.is_good
    for bad in ({"outlier": True}, {"rejected": "no"}, {"soft_failed": True}):
        assert not attrs.evolve(good, **bad).is_good
