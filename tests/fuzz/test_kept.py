"""The kept inputs of fuzzing, without the fuzzer: each that once had a wrong outcome is among them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz.__main__ import LENGTH, SLOW
from tests.fuzz.targets import KEPT, TARGETS, load

INPUTS = sorted(each for each in KEPT.glob("*/*") if each.is_file())


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: str(path.relative_to(KEPT)))
def test_an_input_has_an_outcome_that_is_allowed(path: Path) -> None:
    began = time.process_time()
    load(path.parent.name)(path.read_bytes())
    assert time.process_time() - began < SLOW


def test_every_target_has_inputs_that_the_fuzzer_reads_whole() -> None:
    assert {each.parent.name for each in INPUTS} == {*TARGETS}
    assert all(each.stat().st_size <= LENGTH for each in INPUTS)
    modules = {each.stem.removesuffix("_target") for each in Path(__file__).parent.glob("*_target.py")}
    assert modules == {*TARGETS}
