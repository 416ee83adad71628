"""What a KV block of one model shard is, and who may share it.

``KVSpec`` is everything that decides whether two workers may read each other's blocks. Its digest
seeds every chain hash, so blocks of different namespaces can never meet.
"""

from __future__ import annotations

import msgspec
import xxhash

from tierkv.errors import InvalidArgument

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}
"""Element types a block may hold and their size in bytes."""

TOKEN_ID_MAX = 2**32 - 1
SMALL_SLOT_ALIGN = 64
PAGE = 4096


class KVSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Geometry and identity of a model shard's KV blocks.

    A block holds ``block_tokens`` tokens as ``[layers, 2, block_tokens, kv_heads, head_dim]`` of
    ``dtype`` (layout ``NHD``; ``HND`` swaps the token and head axes). ``fingerprint`` names the
    weights themselves, not their path. ``salt`` separates tenants.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    block_tokens: int = 16
    layout: str = "NHD"
    fingerprint: str = ""
    vocab_size: int = 0
    lora: str = ""
    salt: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def check(self) -> None:
        """Raise InvalidArgument if a field is of another type or out of range."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), KVSpec)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"KVSpec: {error}") from error
        for field in ("layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size"):
            value = getattr(self, field)
            if not 1 <= value <= 65_536:
                raise InvalidArgument(f"KVSpec.{field} is {value}; it must be 1 to 65536")
        if not 0 <= self.vocab_size <= TOKEN_ID_MAX:
            raise InvalidArgument(f"KVSpec.vocab_size is {self.vocab_size}; it must fit 32 bits")
        if not 0 <= self.tp_rank < self.tp_size or not 0 <= self.pp_rank < self.pp_size:
            raise InvalidArgument("KVSpec: a rank must be at least 0 and below its size")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(
                f"KVSpec.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}"
            )
        if self.layout not in ("NHD", "HND"):
            raise InvalidArgument(f"KVSpec.layout is {self.layout!r}; it must be NHD or HND")

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.token_bytes * self.block_tokens

    @property
    def digest(self) -> bytes:
        """16 bytes that name this namespace: xxh3_128 over the spec's canonical encoding."""
        return xxhash.xxh3_128_digest(msgspec.json.encode(self, order="sorted"))


def slot_stride(block_bytes: int) -> int:
    """Bytes from one slot to the next in a RAM arena.

    Pages for real blocks, so that slots serve O_DIRECT and pinning; cache lines for tiny ones.
    """
    align = PAGE if block_bytes >= PAGE else SMALL_SLOT_ALIGN
    return -(-block_bytes // align) * align
