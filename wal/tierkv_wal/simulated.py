"""A file system in memory that can lose power, for crash tests.

The model is harsher than a journaling file system, so that code which passes here relies on no
file system's habits:

- an unsynced write reaches the device sector by sector (512 bytes), in any order, or not at all;
  a sector written several times may be left at any of its versions;
- an unsynced change of size may be undone;
- names made, moved or removed reach the device in order, as far as they got; a synced file whose
  name was not synced is gone; a directory that was not synced in its parent takes its files along;
- a failed ``fdatasync`` drops what it should have written, yet the page cache goes on showing it.

Truncation by ``open`` is the one simplification: it reaches the device at once.
"""

from __future__ import annotations

import errno
import os
import posixpath
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Buffer

SECTOR_BYTES = 512
_ROOT = "/"

_DIRECTORY = None
"""What a name stands for if it is not a file."""


@dataclass(slots=True)
class _File:
    """``cache`` is what reads see. The device holds ``device``, and maybe some of the rest.

    ``versions`` are the contents a sector had since the last sync, by its offset; ``sizes`` the
    sizes that the file had.
    """

    path: str
    cache: bytearray = field(default_factory=bytearray)
    device: bytearray = field(default_factory=bytearray)
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    def grow(self, size: int) -> None:
        if size > len(self.cache):
            self.cache.extend(bytes(size - len(self.cache)))
            self.sizes.append(size)

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        self.grow(end)
        self.cache[offset:end] = data
        for at in range(offset // SECTOR_BYTES * SECTOR_BYTES, end, SECTOR_BYTES):
            self.versions.setdefault(at, []).append(bytes(self.cache[at : at + SECTOR_BYTES]))

    def sync(self) -> None:
        _resize(self.device, len(self.cache))
        for at in self.versions:
            self.device[at : at + SECTOR_BYTES] = self.cache[at : at + SECTOR_BYTES]
        self.lose_pending()

    def lose_pending(self) -> None:
        """Believe that everything is on the device, as the kernel does after a failed sync."""
        self.versions.clear()
        self.sizes.clear()

    def drop_cache(self) -> None:
        size = len(self.cache)
        self.cache[:] = self.device
        _resize(self.cache, size)
        for at, versions in self.versions.items():
            self.cache[at : at + len(versions[-1])] = versions[-1]

    def truncate(self) -> None:
        self.cache.clear()
        self.device.clear()
        self.lose_pending()

    def after_kill(self) -> _File:
        versions = {at: list(seen) for at, seen in self.versions.items()}
        cache, device = bytearray(self.cache), bytearray(self.device)
        return _File(self.path, cache, device, versions, list(self.sizes))

    def after_power_loss(self, path: str, rng: Random) -> _File:
        image = bytearray(self.device)
        size = rng.choice([len(image), *self.sizes])
        _resize(image, max(len(image), len(self.cache)))
        for at, versions in self.versions.items():
            survivor = rng.choice([b"", *versions])
            image[at : at + len(survivor)] = survivor
        _resize(image, size)
        return _File(path, image, bytearray(image))


@dataclass(frozen=True, slots=True)
class _Change:
    """A name that went, a name that came, or both at once; below a directory all names with it."""

    directories: frozenset[str]
    removed: str | None
    added: str | None
    node: _File | None

    def apply(self, names: dict[str, _File | None]) -> None:
        if self.removed is not None:
            names.pop(self.removed, None)
        if self.added is not None:
            names[self.added] = self.node
        if self.removed is not None and self.added is not None and self.node is _DIRECTORY:
            for name in [name for name in names if name.startswith(self.removed + "/")]:
                names[self.added + name.removeprefix(self.removed)] = names.pop(name)


@dataclass(slots=True)
class _Fault:
    """``error`` None: the call claims success and does nothing."""

    error: BaseException | None
    call: str | None
    path: str
    countdown: int
    times: int
    written_bytes: int

    def strikes(self, call: str, path: str) -> bool:
        """Whether it is this call's turn; counts it."""
        if self.call not in (None, call) or self.path not in path or not self.times:
            return False
        self.countdown -= 1
        if self.countdown > 0:
            return False
        self.times -= 1
        return True


class SimulatedStorage:
    """A ``Storage`` in memory. It starts with the root directory alone; relative paths count
    from there.

    ``history`` lists every call as (method, path); for a descriptor, the path its file has then.
    ``before_call`` is told the same before a call does anything: the moment to look at what a
    crash would leave (``crash``), or to end the process by raising. ``struck`` counts the calls
    that a planted fault has hit.
    """

    def __init__(self) -> None:
        self.history: list[tuple[str, str]] = []
        self.before_call: Callable[[str, str], None] = lambda _call, _path: None
        self._names: dict[str, _File | None] = {_ROOT: _DIRECTORY}
        self._durable = dict(self._names)
        self._unsynced: list[_Change] = []
        self._open: dict[int, _File] = {}
        self._read_only: set[int] = set()
        self._next_fd = 3
        self.struck = 0
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    # --- what only tests call --------------------------------------------------------------------

    def inject(
        self,
        error: BaseException | None,
        call: str | None = None,
        *,
        path: str = "",
        nth: int = 1,
        times: int = 1,
        written_bytes: int = 0,
    ) -> None:
        """Let calls fail: ``times`` calls, from the ``nth`` from now on.

        Counted are calls of method ``call`` (None: of any) on paths that contain ``path``.
        ``error`` is raised instead; None: the call returns as if it had been done (a device that
        lies). A write first stores ``written_bytes`` of its bytes. An ``fdatasync`` that fails
        with an OSError loses what it should have written. Each call adds a fault.
        """
        self._faults.append(_Fault(error, call, path, nth, times, written_bytes))

    def clear_faults(self) -> None:
        """Forget all faults that are still to come."""
        self._faults.clear()

    def flip_bit(self, path: str, bit: int) -> None:
        """Let one bit of a file rot, on the device and in the cache. Raises OSError."""
        with self._lock:
            node = self._file(_absolute(path))
            for content in (node.cache, node.device):
                if bit // 8 < len(content):
                    content[bit // 8] ^= 1 << bit % 8

    def crash(self, rng: Random, mode: Literal["kill", "power"]) -> SimulatedStorage:
        """A file system as it may look after a crash now; this one stays as it is.

        "kill": the process died; everything written is there, though no more durable than
        before. "power": the machine died; ``rng`` decides what reached the device.
        """
        after = SimulatedStorage()
        with self._lock:
            if mode == "kill":
                copies = {id(node): node.after_kill() for node in self._files() if node}
                after._names = _copied(self._names, copies)
                after._durable = _copied(self._durable, copies)
                after._unsynced = [
                    _Change(c.directories, c.removed, c.added, copies.get(id(c.node)))
                    for c in self._unsynced
                ]
                return after
            names = dict(self._durable)
            for change in self._unsynced[: rng.randint(0, len(self._unsynced))]:
                change.apply(names)
            for path in sorted(names):
                node = names[path]
                if _parent(path) in after._names:
                    after._names[path] = node.after_power_loss(path, rng) if node else _DIRECTORY
            after._durable = dict(after._names)
        return after

    # --- Storage ---------------------------------------------------------------------------------

    def open(
        self,
        path: str,
        *,
        create: bool = False,
        truncate: bool = False,
        writable: bool = True,
        direct: bool = False,
    ) -> int:
        """See Storage. ``direct`` changes nothing: what is not synced is no surer on a device."""
        path = _absolute(path)
        with self._call("open", path):
            if create and path not in self._names:
                self._require_directory(_parent(path))
                self._change(None, path, _File(path))
            node = self._file(path)
            if truncate:
                node.truncate()
            fd = self._next_fd
            self._next_fd += 1
            self._open[fd] = node
            if not writable:
                self._read_only.add(fd)
            return fd

    def close(self, fd: int) -> None:
        with self._call("close", self._opened(fd).path):
            del self._open[fd]

    def pwrite(self, fd: int, data: Buffer, offset: int) -> None:
        self._write("pwrite", fd, [data], offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        self._write("pwritev", fd, buffers, offset)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        node = self._opened(fd)
        with self._call("pread", node.path):
            return bytes(node.cache[offset : offset + length])

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        node = self._opened(fd)
        with self._call("preadv", node.path):
            total = 0
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                start = offset + total
                chunk = node.cache[start : start + view.nbytes]
                view[: len(chunk)] = chunk
                total += len(chunk)
            return total

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Nothing: an unsynced write may have reached the device anyhow, or not."""
        self._opened(fd)

    def fdatasync(self, fd: int) -> None:
        node = self._opened(fd)

        def fail(fault: _Fault) -> None:
            if isinstance(fault.error, OSError):
                node.lose_pending()

        with self._call("fdatasync", node.path, fail) as works:
            if works:
                node.sync()

    def drop_cache(self, fd: int) -> None:
        node = self._opened(fd)
        with self._call("drop_cache", node.path):
            node.drop_cache()

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        node = self._opened(fd, to_write=True)
        with self._call("fallocate", node.path):
            node.grow(offset + length)

    def size(self, path: str) -> int:
        path = _absolute(path)
        with self._call("size", path):
            return len(self._file(path).cache)

    def rename(self, source: str, target: str) -> None:
        source, target = _absolute(source), _absolute(target)
        with self._call("rename", source):
            self._require_directory(_parent(target))
            if source in self._names and self._names[source] is _DIRECTORY:
                self._change(source, target, _DIRECTORY)
                for name, below in self._names.items():
                    if below is not None and name.startswith(target + "/"):
                        below.path = name
                return
            node = self._file(source)
            node.path = target
            self._change(source, target, node)

    def unlink(self, path: str) -> None:
        path = _absolute(path)
        with self._call("unlink", path):
            self._file(path)
            self._change(path, None, None)

    def mkdir(self, path: str) -> None:
        path = _absolute(path)
        with self._call("mkdir", path):
            self._require_directory(_parent(path))
            if path in self._names:
                raise _os_error(errno.EEXIST, path)
            self._change(None, path, _DIRECTORY)

    def listdir(self, path: str) -> list[str]:
        path = _absolute(path)
        with self._call("listdir", path):
            self._require_directory(path)
            found = [name for name in self._names if _parent(name) == path != name]
            return sorted(posixpath.basename(name) for name in found)

    def fsync_dir(self, path: str) -> None:
        path = _absolute(path)
        with self._call("fsync_dir", path) as works:
            self._require_directory(path)
            if not works:
                return
            for change in self._unsynced:
                if path in change.directories:
                    change.apply(self._durable)
            self._unsynced = [c for c in self._unsynced if path not in c.directories]

    # --- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _call(
        self, name: str, path: str, fail: Callable[[_Fault], None] | None = None
    ) -> Iterator[bool]:
        """One call at a time: note it; if a fault waits for it, ``fail`` and raise.

        Yields whether the call shall do its work; a lying one does not.
        """
        self.before_call(name, path)
        with self._lock:
            self.history.append((name, path))
            for fault in self._faults:
                if not fault.strikes(name, path):
                    continue
                self.struck += 1
                if fail is not None:
                    fail(fault)
                if fault.error is not None:
                    raise fault.error
                yield False
                return
            yield True

    def _write(self, name: str, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        node = self._opened(fd, to_write=True)
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)

        def fail(fault: _Fault) -> None:
            if fault.written_bytes:
                node.write(data[: fault.written_bytes], offset)

        with self._call(name, node.path, fail) as works:
            if works:
                node.write(data, offset)

    def _change(self, removed: str | None, added: str | None, node: _File | None) -> None:
        directories = frozenset(_parent(path) for path in (removed, added) if path is not None)
        change = _Change(directories, removed, added, node)
        change.apply(self._names)
        self._unsynced.append(change)

    def _files(self) -> list[_File | None]:
        changed = [change.node for change in self._unsynced]
        return [*self._names.values(), *self._durable.values(), *changed]

    def _opened(self, fd: int, *, to_write: bool = False) -> _File:
        if fd not in self._open or (to_write and fd in self._read_only):
            raise _os_error(errno.EBADF, f"descriptor {fd}")
        return self._open[fd]

    def _file(self, path: str) -> _File:
        node = self._names.get(path)
        if node is None:
            raise _os_error(errno.EISDIR if path in self._names else errno.ENOENT, path)
        return node

    def _require_directory(self, path: str) -> None:
        if self._names.get(path, _DIRECTORY) is not _DIRECTORY:
            raise _os_error(errno.ENOTDIR, path)
        if path not in self._names:
            raise _os_error(errno.ENOENT, path)


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join(_ROOT, path))


def _parent(path: str) -> str:
    return posixpath.dirname(path)


def _resize(buffer: bytearray, size: int) -> None:
    del buffer[size:]
    buffer.extend(bytes(size - len(buffer)))


def _copied(names: dict[str, _File | None], copies: dict[int, _File]) -> dict[str, _File | None]:
    return {path: copies.get(id(node)) for path, node in names.items()}


def _os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
