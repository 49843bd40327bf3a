"""The options of ``replication skipped``; tests/cli/test_skipping.py has the rest."""

from __future__ import annotations

import pytest

from replication.cli import skipped


@pytest.mark.parametrize("limit", ["0", "10001"])
def test_a_limit_out_of_range_is_refused(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        skipped.main(["--limit", limit])
    assert "is not between 1 and 10000" in capsys.readouterr().err
