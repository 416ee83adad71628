"""The work record that every backend runs, and the plan that holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_MASK = -(2**31)
"""Value of ``pos0`` in a record whose queries all see all of its keys."""


class Record(NamedTuple):
    """One piece of work: queries ``q_tok .. q_tok + n_tok`` attend to keys ``kv_begin .. kv_end``.

    The keys are those of block-table row ``table_row``. Query ``i`` of the record (row
    ``q_tok + i`` of q) sits at position ``pos0 + i`` of its sequence, to which causality and window
    apply; ``pos0`` is NO_MASK where nothing is hidden. ``kv_begin == kv_end`` means that these
    queries see no key: output 0, lse -inf. ``n_tok == 0`` is padding. All fields are int32.
    """

    q_tok: int
    n_tok: int
    table_row: int
    kv_begin: int
    kv_end: int
    pos0: int
    part: int
    """First row of the record's partial states; -1: the record writes the output itself."""


RECORD_DTYPE = np.dtype([(name, np.int32) for name in Record._fields])
"""Record as a C struct: seven packed int32."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """The work of one step, on the host.

    records: [R] of RECORD_DTYPE.
    num_partials: rows of partial states (each [num_q_heads, head_dim] and [num_q_heads]) that
        records with ``part >= 0`` write.
    merge_tokens: [M] int32, the rows of q whose output is a merge of partial states.
    merge_indptr: [M + 1] int32; row ``merge_tokens[m]`` merges the partial rows
        ``merge_rows[merge_indptr[m]:merge_indptr[m + 1]]``.
    seq_lens: [B] int32. q_indptr: [B + 1] int32. The rest are the arguments of ``plan``.
    scratch: what a backend keeps between the layers of the step, such as work space. Because of it
        one plan serves one thread at a time.
    """

    records: npt.NDArray[np.void]
    num_partials: int
    merge_tokens: npt.NDArray[np.int32]
    merge_indptr: npt.NDArray[np.int32]
    merge_rows: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    q_indptr: npt.NDArray[np.int32]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    causal: bool
    window: int
    shared_prefix: tuple[tuple[int, int, int], ...]
    scratch: dict[str, Any] = field(default_factory=dict, repr=False)
