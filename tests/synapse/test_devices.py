"""Tests of the rows of streams about devices."""

from __future__ import annotations

from replication.synapse.devices import (
    DEVICE_LISTS,
    TO_DEVICE,
    USER_SIGNATURE,
    DeviceListsRow,
    ToDeviceRow,
    UserSignatureRow,
)


def test_trap_35_rows_of_later_versions_are_read() -> None:
    assert DEVICE_LISTS.read_row('["@u:h"]') == DeviceListsRow("@u:h")
    assert DEVICE_LISTS.read_row('["@u:h",false]') == DeviceListsRow("@u:h")  # 1.76
    assert DEVICE_LISTS.read_row('["@u:h",false,true]') == DeviceListsRow("@u:h")  # 1.110


def test_rows_of_the_other_streams_are_typed() -> None:
    assert TO_DEVICE.read_row('["h.example"]') == ToDeviceRow("h.example")
    assert USER_SIGNATURE.read_row('["@u:h"]') == UserSignatureRow("@u:h")
