"""Random paged batches; and all that is in ``attention_cases``."""

from __future__ import annotations

import torch
from attention_cases import FP8, GARBAGE, Batch, Shape, check_output, make_batch
from hypothesis import strategies as st

__all__ = ["FP8", "GARBAGE", "Batch", "Shape", "check_output", "make_batch", "shapes"]


@st.composite
def shapes(draw: st.DrawFn, *, shared: bool = False) -> Shape:
    """With ``shared``, all sequences begin with the same tokens, which end before any query."""
    block_size = draw(st.integers(1, 64))
    num_sequences = draw(st.integers(2 if shared else 1, 4))
    shared_tokens = draw(st.integers(1, 80)) if shared else 0
    lengths = []
    for _ in range(num_sequences):
        q_len = draw(st.integers(0, 33))
        past = draw(st.integers(0, 90))
        if not shared and draw(st.integers(0, 3)) == 0:
            past = -min(past % 4, q_len)  # more queries than tokens: the first ones see nothing
        lengths.append((shared_tokens + past + q_len, q_len))
    dtype = draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    kv_heads, group = draw(
        st.sampled_from(((1, 1), (3, 1), (1, 4), (1, 17), (2, 2), (2, 5), (4, 2)))
    )
    return Shape(
        lengths=tuple(lengths),
        kv_heads=kv_heads,
        group=group,
        head_dim=draw(st.sampled_from((16, 64, 80))),
        block_size=block_size,
        dtype=dtype,
        kv_dtype=draw(st.sampled_from((None, None, None, FP8))),
        layout=draw(st.sampled_from(("nhd", "hnd", "pool nhd", "pool hnd"))),
        in_order=draw(st.booleans()),
        shared_tokens=shared_tokens,
        causal=draw(st.booleans()),
        window=-1 if shared else draw(st.sampled_from((-1, -1, 0, 1, 5, 31, 64, 200))),
        softcap=draw(st.sampled_from((0.0, 0.0, 1.0, 30.0))),
        seed=draw(st.integers(0, 2**16)),
    )
