"""The bytes of a warm set: cached blocks in one file that moves between hosts.

docs/WARMSET.md describes them. Reading takes bytes as they come, from a pipe as well, and gives no
block away before all that is said of it was checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import xxhash

from tierkv.core.spec import BLOCK_BYTES_MAX, KVSpec
from tierkv.errors import CorruptionError, InvalidArgument, TierkvError

MAGIC = b"TKVSET\x00\x01"
VERSION = 1
NO_PARENT = 2**64 - 1

_HEADER = struct.Struct("<8sII8s")
_CHECK = struct.Struct("<Q")
_FRAME = struct.Struct("<cxxxIQ")
_BLOCK = struct.Struct("<IQQ16s")
_END = struct.Struct("<QQ16s")
_NAMESPACE, _A_BLOCK, _THE_END = b"N", b"B", b"E"
_BODY_MAX = BLOCK_BYTES_MAX + (1 << 20)


@dataclass(frozen=True)
class SetBlock:
    """One block. ``namespace`` and ``parent`` count namespaces and blocks of the file."""

    namespace: int
    parent: int
    extra: int
    hash: bytes
    tokens: bytes
    payload: bytes


@dataclass(frozen=True)
class SetEnd:
    """The set is whole."""

    blocks: int
    namespaces: int


class SetEncoder:
    """Makes the bytes, in order."""

    def __init__(self) -> None:
        self.blocks = 0
        self.namespaces = 0
        self._offset = 0
        self._checks = xxhash.xxh3_128()

    def header(self) -> bytes:
        """The first bytes."""
        return self._placed(_with_check(_HEADER.pack(MAGIC, VERSION, 0, bytes(8))))

    def namespace(self, spec: KVSpec) -> bytes:
        """A namespace, before the first block of it."""
        self.namespaces += 1
        return self._frame(_NAMESPACE, msgspec.json.encode(spec, order="sorted"))

    def block(self, block: SetBlock) -> bytes:
        """A block, after its parent."""
        self.blocks += 1
        about = _BLOCK.pack(block.namespace, block.parent, block.extra, block.hash)
        return self._frame(_A_BLOCK, about + block.tokens + block.payload)

    def end(self) -> bytes:
        """The last bytes."""
        return self._frame(_THE_END, _END.pack(self.blocks, self.namespaces, self._checks.digest()))

    def _frame(self, kind: bytes, body: bytes) -> bytes:
        check = _check_of(kind, body, self._offset)
        self._checks.update(_CHECK.pack(check))
        return self._placed(_FRAME.pack(kind, len(body), check) + body)

    def _placed(self, data: bytes) -> bytes:
        self._offset += len(data)
        return data


class SetDecoder:
    """Takes the bytes as they come, and gives what is whole. ``name``: of the file, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._data = bytearray()
        self._offset = 0
        self._begun = False
        self._ended = False
        self._specs: list[KVSpec] = []
        self._of: list[tuple[int, bytes]] = []
        """Namespace and hash of each block so far."""
        self._checks = xxhash.xxh3_128()

    def feed(self, data: bytes) -> Iterator[KVSpec | SetBlock | SetEnd]:
        """What has become whole. Raises CorruptionError, naming the offset, InvalidArgument."""
        self._data += data
        if not self._begun and len(self._data) >= _HEADER.size + _CHECK.size:
            self._read_header(self._take(_HEADER.size + _CHECK.size))
        while self._begun and len(self._data) >= _FRAME.size:
            kind, length, check = _FRAME.unpack_from(self._data)
            if length > _BODY_MAX or any(self._data[1:4]) or self._ended:
                raise self._damaged("here is no frame")
            if len(self._data) < _FRAME.size + length:
                return
            at = self._offset
            body = self._take(_FRAME.size + length)[_FRAME.size :]
            if _check_of(kind, body, at) != check:
                raise self._damaged("its checksum fails", at)
            found = self._read(kind, body, at)
            self._checks.update(_CHECK.pack(check))
            yield found

    def finish(self) -> None:
        """All bytes have come. Raises CorruptionError if the set has no end, or goes on behind."""
        if not self._ended:
            end = self._offset + len(self._data)
            raise self._damaged(f"the file ends at byte {end}, in the midst of what begins here")
        if self._data:
            raise self._damaged("bytes follow its end")

    def _read_header(self, header: bytes) -> None:
        magic, version, *_ = _HEADER.unpack_from(header)
        if magic != MAGIC:
            raise InvalidArgument(f"{self._name} is no warm set: `tierkv export` makes one")
        if _with_check(header[: _HEADER.size]) != header:
            raise self._damaged("its checksum fails", 0)
        if version != VERSION:
            raise InvalidArgument(
                f"{self._name} is of format {version}, this tierkv knows {VERSION}: use the other "
                "version, or export it anew"
            )
        self._begun = True

    def _read(self, kind: bytes, body: bytes, at: int) -> KVSpec | SetBlock | SetEnd:
        if kind == _NAMESPACE:
            return self._read_namespace(body, at)
        if kind == _A_BLOCK:
            return self._read_block(body, at)
        if kind == _THE_END and len(body) == _END.size:
            blocks, namespaces, checks = _END.unpack(body)
            said = (len(self._of), len(self._specs), self._checks.digest())
            if (blocks, namespaces, checks) != said:
                raise self._damaged("something before it is missing", at)
            self._ended = True
            return SetEnd(blocks, namespaces)
        raise self._damaged("here is no frame", at)

    def _read_namespace(self, body: bytes, at: int) -> KVSpec:
        try:
            spec = msgspec.json.decode(body, type=KVSpec)
            spec.check()
        except (msgspec.DecodeError, TierkvError) as error:
            raise InvalidArgument(
                f"{self._name}, byte {at}: a namespace that this tierkv does not know: {error}"
            ) from error
        self._specs.append(spec)
        return spec

    def _read_block(self, body: bytes, at: int) -> SetBlock:
        if len(body) < _BLOCK.size:
            raise self._damaged("here is no frame", at)
        namespace, parent, extra, name = _BLOCK.unpack_from(body)
        known = namespace < len(self._specs) and (parent == NO_PARENT or parent < len(self._of))
        if not known or (parent != NO_PARENT and self._of[parent][0] != namespace):
            raise self._damaged("the block has no beginning", at)
        spec = self._specs[namespace]
        tokens_end = _BLOCK.size + 4 * spec.block_tokens
        if len(body) != tokens_end + spec.block_bytes:
            raise self._damaged("the block is not of its namespace's size", at)
        tokens = body[_BLOCK.size : tokens_end]
        before = spec.digest if parent == NO_PARENT else self._of[parent][1]
        keys = extra.to_bytes(8, "little") if extra else b""
        if xxhash.xxh3_128_digest(before + tokens + keys) != name:
            raise self._damaged("the block's name is not that of its tokens", at)
        self._of.append((namespace, name))
        return SetBlock(namespace, parent, extra, name, tokens, body[tokens_end:])

    def _take(self, count: int) -> bytes:
        taken = bytes(self._data[:count])
        del self._data[:count]
        self._offset += count
        return taken

    def _damaged(self, what: str, at: int | None = None) -> CorruptionError:
        at = self._offset if at is None else at
        return CorruptionError(
            f"{self._name} is damaged at byte {at}: {what}; blocks before it are whole",
            path=self._name,
            offset=at,
        )


def _check_of(kind: bytes, body: bytes, offset: int) -> int:
    """Of a frame that begins at this byte of the file, so that it stands nowhere else."""
    digest = xxhash.xxh3_64(kind + len(body).to_bytes(4, "little"), seed=offset)
    digest.update(body)
    return digest.intdigest()


def _with_check(data: bytes) -> bytes:
    return data + _CHECK.pack(xxhash.xxh3_64_intdigest(data))
