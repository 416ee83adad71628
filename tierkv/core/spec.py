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
BLOCK_BYTES_MAX = 1 << 30
"""More than any engine's blocks, and less than a single read of a file can bring."""

TENANT_CHARACTERS_MAX = 128

SMALL_SLOT_ALIGN = 64
PAGE = 4096
_GEOMETRY = ("layers", "kv_heads", "head_dim")


class KVSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Geometry and identity of a model shard's KV blocks.

    A block holds ``block_tokens`` tokens as ``[layers, 2, block_tokens, kv_heads, head_dim]`` of
    ``dtype`` (layout ``NHD``; ``HND`` swaps the token and head axes). ``fingerprint`` names the
    weights themselves, not their path. ``tenant`` names whose blocks these are, for operators and
    their metrics; like all other fields it separates. So does ``salt``, which nobody is shown.

    Blocks whose bytes only their engine understands have a ``packing``, a tag for that format
    (engine, version, layout), and ``packed_bytes`` each. Of such a spec layers, heads, layout and
    dtype, by any name, need not be given; what is given separates. Nothing but copying is done
    with these blocks.
    """

    model: str
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "float32"
    block_tokens: int = 16
    layout: str = "NHD"
    fingerprint: str = ""
    vocab_size: int = 0
    lora: str = ""
    salt: str = ""
    tenant: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    packing: str = ""
    packed_bytes: int = 0

    def check(self) -> None:
        """Raise InvalidArgument if a field is of another type or out of range."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), KVSpec)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"KVSpec: {error}") from error
        for field in ("layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size"):
            least = 0 if self.packing and field in _GEOMETRY else 1
            value = getattr(self, field)
            if not least <= value <= 65_536:
                raise InvalidArgument(f"KVSpec.{field} is {value}; it must be {least} to 65536")
        if not 0 <= self.vocab_size <= TOKEN_ID_MAX:
            raise InvalidArgument(f"KVSpec.vocab_size is {self.vocab_size}; it must fit 32 bits")
        if not 0 <= self.tp_rank < self.tp_size or not 0 <= self.pp_rank < self.pp_size:
            raise InvalidArgument("KVSpec: a rank must be at least 0 and below its size")
        if self.dtype not in DTYPE_BYTES and not self.packing:
            raise InvalidArgument(
                f"KVSpec.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}"
            )
        if len(self.tenant) > TENANT_CHARACTERS_MAX or not self.tenant.isprintable():
            raise InvalidArgument(
                f"KVSpec.tenant is {self.tenant[:80]!r}; it must be printable, and at most "
                f"{TENANT_CHARACTERS_MAX} characters"
            )
        if self.layout not in ("NHD", "HND"):
            raise InvalidArgument(f"KVSpec.layout is {self.layout!r}; it must be NHD or HND")
        self._check_bytes()

    def _check_bytes(self) -> None:
        if not self.packing and self.packed_bytes:
            raise InvalidArgument(
                f"KVSpec.packed_bytes is {self.packed_bytes}, and KVSpec.packing is empty; name "
                "the format of the blocks"
            )
        if not 1 <= self.block_bytes <= BLOCK_BYTES_MAX:
            field = "packed_bytes" if self.packing else "block_bytes"
            raise InvalidArgument(
                f"KVSpec.{field} is {self.block_bytes}; it must be 1 to {BLOCK_BYTES_MAX}"
            )

    def require_plain(self) -> None:
        """Raise InvalidArgument if only an engine understands the blocks."""
        if self.packing:
            raise InvalidArgument(
                f"the blocks of {self.model!r} are packed as {self.packing!r}, which only their "
                "engine understands; copy them, by write_pages and read_pages or write and read"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers. Raises InvalidArgument for packed blocks."""
        self.require_plain()
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.packed_bytes if self.packing else self.token_bytes * self.block_tokens

    @property
    def digest(self) -> bytes:
        """16 bytes that name this namespace: xxh3_128 over the spec's canonical encoding."""
        fields = msgspec.structs.asdict(self)
        if not self.packing:
            del fields["packing"], fields["packed_bytes"]
        if not self.tenant:
            del fields["tenant"]
        return xxhash.xxh3_128_digest(msgspec.json.encode(fields, order="sorted"))


def slot_stride(block_bytes: int) -> int:
    """Bytes from one slot to the next in a RAM arena.

    Pages for real blocks, so that slots serve O_DIRECT and pinning; cache lines for tiny ones.
    """
    align = PAGE if block_bytes >= PAGE else SMALL_SLOT_ALIGN
    return -(-block_bytes // align) * align
