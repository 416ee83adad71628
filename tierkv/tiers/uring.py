"""Reads by io_uring: the kernel works on a queue of reads, and no thread waits for each of them.

A ring is two arrays in memory that is shared with the kernel: submissions and completions. Each has
a head, where one side takes out, and a tail, where the other puts in. Plain stores and loads are
enough between two processors of the x86-64 kind; for others nobody has shown it here, and there
``Ring`` refuses. All numbers are from linux/io_uring.h.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

from tierkv.pages import libc
from tierkv.tiers.reads import Batches, Read, plain_read
from tierkv.tiers.storage import BlockStorage

DEPTH = 32
"""Reads of one request that the device is given at once."""

REAP = 8
"""Completions that are waited for and handed on at a time. To look at eight blocks costs little
more than to look at one; with many more the device would run dry meanwhile."""

_SETUP, _ENTER = 425, 426
_ENTER_GETEVENTS = 1
_FEAT_SINGLE_MMAP = 1
_SUBMISSIONS_AT = 0x10000000
_OP_READV = 1
_WORD = 4
_WORD_MASK = 0xFFFFFFFF
_PARAMS = struct.Struct("<30I")
_SUBMISSION = struct.Struct("<BBHiQQIIQ24x")
_COMPLETION = struct.Struct("<QiI")


class _Begun(NamedTuple):
    """A read that is in the ring. ``iovecs`` stay where they are until it is done."""

    read: Read
    size: int
    iovecs: ctypes.Array[ctypes.c_uint64]


class Ring:
    """One ring, for one thread at a time."""

    def __init__(self, depth: int = DEPTH) -> None:
        """``depth``: a power of two. Raises OSError if there is no ring to be had."""
        if platform.machine() != "x86_64":
            raise OSError(errno.ENOSYS, f"io_uring is not used on {platform.machine()}")
        self._depth = depth
        self._begun: dict[int, _Begun] = {}
        params = ctypes.create_string_buffer(_PARAMS.size)
        self._fd = _call(_SETUP, depth, ctypes.addressof(params))
        try:
            self._map(*_PARAMS.unpack(params.raw))
        except BaseException:
            os.close(self._fd)
            raise

    def _map(self, *params: int) -> None:
        entries, completions, features = params[0], params[1], params[5]
        if not features & _FEAT_SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")
        # The fields' places in the shared memory: io_sqring_offsets and io_cqring_offsets.
        array, self._completions_at = params[16], params[25]
        end = max(array + entries * _WORD, self._completions_at + completions * _COMPLETION.size)
        self._shared = mmap.mmap(self._fd, end)
        try:
            size = entries * _SUBMISSION.size
            self._submissions = mmap.mmap(self._fd, size, offset=_SUBMISSIONS_AT)
        except BaseException:
            self._shared.close()
            raise
        self._words = memoryview(self._shared).cast("I")
        self._tail = params[11] // _WORD
        self._done_head, self._done_tail = params[20] // _WORD, params[21] // _WORD
        self._mask, self._done_mask = entries - 1, completions - 1
        for index in range(entries):
            self._words[array // _WORD + index] = index

    def read(self, storage: BlockStorage, reads: Iterable[Read]) -> Batches:
        """See Reads.

        A read that does not come back whole is made once more through ``storage``: so ends of
        files, errors and a kernel that is short of memory need no second treatment here.
        """
        following = iter(enumerate(reads))
        try:
            refused = self._begin(following)
            while self._begun or refused:
                done = [(at, plain_read(storage, read)) for at, read in refused]
                if self._begun:
                    done += [
                        (at, size if got == size else plain_read(storage, read))
                        for at, (read, size, _), got in self._reap(min(REAP, len(self._begun)))
                    ]
                # The device goes on while the caller looks at these.
                refused = self._begin(following)
                yield done
        finally:
            # Nothing may write to the buffers once we have returned.
            while self._begun:
                self._reap(len(self._begun))

    def close(self) -> None:
        """Give memory and descriptor back."""
        self._words.release()
        self._shared.close()
        self._submissions.close()
        os.close(self._fd)

    def _begin(self, following: Iterator[tuple[int, Read]]) -> list[tuple[int, Read]]:
        """Fill the ring; returns the reads that the kernel does not take now."""
        added = list(itertools.islice(following, self._depth - len(self._begun)))
        for at, read in added:
            self._add(at, read)
        left = len(added)
        while left:
            try:
                left -= _call(_ENTER, self._fd, left, 0, 0, 0, 0)
            except OSError:
                refused = added[-left:]
                self._words[self._tail] = (self._words[self._tail] - left) & _WORD_MASK
                for at, _ in refused:
                    del self._begun[at]
                return refused
        return []

    def _add(self, at: int, read: Read) -> None:
        places: list[int] = []
        size = 0
        for buffer in read.buffers:
            size += len(buffer)
            places += ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer)
        iovecs = (ctypes.c_uint64 * len(places))(*places)
        tail = self._words[self._tail]
        _SUBMISSION.pack_into(
            self._submissions,
            (tail & self._mask) * _SUBMISSION.size,
            *(_OP_READV, 0, 0, read.fd, read.offset),
            *(ctypes.addressof(iovecs), len(read.buffers), 0, at),
        )
        self._words[self._tail] = (tail + 1) & _WORD_MASK
        self._begun[at] = _Begun(read, size, iovecs)

    def _reap(self, count: int) -> list[tuple[int, _Begun, int]]:
        """``count`` completions, each with what the kernel says of it; waits for them."""
        head = self._words[self._done_head]
        if (self._words[self._done_tail] - head) & _WORD_MASK < count:
            _call(_ENTER, self._fd, 0, count, _ENTER_GETEVENTS, 0, 0)
        ended = []
        for _ in range(count):
            place = self._completions_at + (head & self._done_mask) * _COMPLETION.size
            at, result, _flags = _COMPLETION.unpack_from(self._shared, place)
            ended.append((at, self._begun.pop(at), result))
            head = (head + 1) & _WORD_MASK
        self._words[self._done_head] = head
        return ended


class RingReads:
    """As many rings as there are threads that read; one more has to wait for its turn."""

    name = "io_uring"

    def __init__(self, storage: BlockStorage, rings: int) -> None:
        """Raises OSError if there are none to be had."""
        self._storage = storage
        self._idle: SimpleQueue[Ring] = SimpleQueue()
        self._rings: list[Ring] = []
        try:
            for _ in range(rings):
                self._rings.append(Ring())
                self._idle.put(self._rings[-1])
        except OSError:
            self.close()
            raise

    def read(self, reads: Iterable[Read]) -> Batches:
        """See Reads."""
        ring = self._idle.get()
        try:
            yield from ring.read(self._storage, reads)
        finally:
            self._idle.put(ring)

    def close(self) -> None:
        """Close the rings."""
        for ring in self._rings:
            ring.close()
        self._rings.clear()


def _call(number: int, *arguments: int) -> int:
    """A system call, made without the interpreter lock. Raises OSError."""
    words = [ctypes.c_long(argument) for argument in arguments]
    while True:
        result = libc().syscall(ctypes.c_long(number), *words)
        if result >= 0:
            return int(result)
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
