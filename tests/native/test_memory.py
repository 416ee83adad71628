"""Addresses that are remembered are right, and keep nothing alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from tierkv.native.memory import LASTING_MAX, LastingAddresses


def test_the_address_is_the_arrays_own_whatever_was_there_before() -> None:
    addresses = LastingAddresses()
    for round_ in range(50):
        # Freed at the end of each round, so names of objects and memory are used again.
        arrays = [np.zeros(100 + round_, np.uint64) for _ in range(LASTING_MAX + 3)]
        for _ in range(2):
            assert [addresses(array) for array in arrays] == [array.ctypes.data for array in arrays]


def test_views_and_read_only_arrays_have_addresses_too() -> None:
    addresses, array = LastingAddresses(), np.arange(100)
    view, frozen = array[10:], array[20:].view()
    frozen.flags.writeable = False
    assert addresses(view) == array.ctypes.data + 80
    assert addresses(frozen) == array.ctypes.data + 160


def test_nothing_is_kept_alive() -> None:
    addresses, array = LastingAddresses(), np.zeros(1000)
    addresses(array)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is None
