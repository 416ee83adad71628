"""Reads by io_uring: the kernel works on a queue of reads, and no thread waits for each of them.

A ring is two arrays in memory that is shared with the kernel: submissions and completions. Each has
a head, where one side takes out, and a tail, where the other puts in. Plain stores and loads are
enough between two processors of the x86-64 kind; for others nobody has shown it here, and there
``Ring`` refuses. All numbers are from linux/io_uring.h.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import I64
from tierkv.pages import libc
from tierkv.tiers.reads import Batches, Done, ReadList, plain_read
from tierkv.tiers.storage import BlockStorage

DEPTH = 32
"""Reads of one request that the device is given at once."""

REAP = 16
REAP_BYTES = 16 << 20
"""Completions that are waited for and handed on at a time; fewer if that were more bytes. To look
at some blocks costs little more than to look at one; with too many of them the device would run
dry meanwhile, and the last ones would wait for one another."""

_SETUP, _ENTER = 425, 426
_ENTER_GETEVENTS = 1
_FEAT_SINGLE_MMAP = 1
_SUBMISSIONS_AT = 0x10000000
_OP_READV = 1
_WORD = 4
_WORD_MASK = 0xFFFFFFFF
_PARAMS = struct.Struct("<30I")

_SUBMISSION = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("pieces", "<u8"),
        ("count", "<u4"),
        ("rw_flags", "<u4"),
        ("number", "<u8"),
        ("rest", "V24"),
    ]
)
_COMPLETION = np.dtype([("number", "<u8"), ("got", "<i4"), ("flags", "<u4")])

_Submissions = npt.NDArray[np.void]


class Ring:
    """One ring, for one thread at a time."""

    def __init__(self, depth: int = DEPTH) -> None:
        """``depth``: a power of two. Raises OSError if there is no ring to be had."""
        if platform.machine() != "x86_64":
            raise OSError(errno.ENOSYS, f"io_uring is not used on {platform.machine()}")
        self._depth = depth
        self._under_way = 0
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
        array, completions_at = params[16], params[25]
        end = max(array + entries * _WORD, completions_at + completions * _COMPLETION.itemsize)
        # Unmapped when nothing here looks at them any more.
        shared = mmap.mmap(self._fd, end)
        size = entries * _SUBMISSION.itemsize
        submissions = mmap.mmap(self._fd, size, offset=_SUBMISSIONS_AT)
        self._submissions = np.frombuffer(submissions, _SUBMISSION)
        self._completions = np.frombuffer(shared, _COMPLETION, completions, completions_at)
        self._words = memoryview(shared).cast("I")
        self._tail = params[11] // _WORD
        self._done_head, self._done_tail = params[20] // _WORD, params[21] // _WORD
        self._mask, self._done_mask = entries - 1, completions - 1
        for index in range(entries):
            self._words[array // _WORD + index] = index

    def read(self, storage: BlockStorage, reads: ReadList) -> Batches:
        """See Reads.

        A read that does not come back whole is made once more through ``storage``: so ends of
        files, errors and a kernel that is short of memory need no second treatment here.
        """
        submissions, sizes = submissions_of(reads), reads.sizes()
        most = max(1, min(REAP, REAP_BYTES // max(1, int(sizes.max(initial=0)))))
        try:
            following, refused = self._begin(submissions, 0)
            while self._under_way or len(refused):
                done = self._reap(min(most, self._under_way))
                numbers = np.concatenate([refused, done["number"].astype(np.int64)])
                got = np.concatenate([np.zeros_like(refused), done["got"].astype(np.int64)])
                for at in np.flatnonzero(got != sizes[numbers]).tolist():
                    got[at] = plain_read(storage, reads, int(numbers[at]))
                # The device goes on while the caller looks at these.
                following, refused = self._begin(submissions, following)
                yield Done(numbers, got)
        finally:
            # Nothing may write to the memory once we have returned.
            while self._under_way:
                self._reap(self._under_way)

    def close(self) -> None:
        """Give memory and descriptor back."""
        self._words.release()
        del self._submissions, self._completions
        os.close(self._fd)

    def _begin(self, submissions: _Submissions, first: int) -> tuple[int, I64]:
        """Fill the ring from the submission ``first`` on.

        Returns which one comes next, and the numbers of reads that the kernel does not take now.
        """
        following = min(first + self._depth - self._under_way, len(submissions))
        left = following - first
        tail = self._words[self._tail]
        self._submissions[(tail + np.arange(left)) & self._mask] = submissions[first:following]
        self._words[self._tail] = (tail + left) & _WORD_MASK
        while left:
            try:
                taken = _call(_ENTER, self._fd, left, 0, 0, 0, 0)
            except OSError:
                self._words[self._tail] = (self._words[self._tail] - left) & _WORD_MASK
                break
            self._under_way += taken
            left -= taken
        return following, np.arange(following - left, following)

    def _reap(self, count: int) -> npt.NDArray[np.void]:
        """``count`` completions; waits for them."""
        head = self._words[self._done_head]
        if (self._words[self._done_tail] - head) & _WORD_MASK < count:
            _call(_ENTER, self._fd, 0, count, _ENTER_GETEVENTS, 0, 0)
        done: npt.NDArray[np.void] = self._completions[(head + np.arange(count)) & self._done_mask]
        self._words[self._done_head] = (head + count) & _WORD_MASK
        self._under_way -= count
        return done


def submissions_of(reads: ReadList) -> _Submissions:
    """What the kernel is to be told, of all reads. Keep ``reads`` until they are done."""
    submissions = np.zeros(len(reads.fds), _SUBMISSION)
    submissions["opcode"] = _OP_READV
    submissions["fd"] = reads.fds
    submissions["offset"] = reads.offsets
    submissions["pieces"] = reads.pieces.ctypes.data + reads.firsts() * reads.pieces.itemsize * 2
    submissions["count"] = reads.counts
    submissions["number"] = np.arange(len(reads.fds))
    return submissions


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

    def read(self, reads: ReadList) -> Batches:
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
