"""The mapped pool as torch tensors: views, scatter, block tables. The only module with torch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import tierkv_kernels
import torch

from tierkv.client.core import Steps
from tierkv.client.namespaces import AttendPlan, NamespaceCore
from tierkv.client.sequences import SequenceCore
from tierkv.core.ids import U8
from tierkv.errors import InvalidArgument
from tierkv.gpu import GpuRows

_ONE_BYTE = (torch.uint8, torch.float8_e4m3fn)

GPU_SPLIT_TOKENS = 512
"""On a GPU, keys of few query rows are cut at multiples of this: unsplit, a sequence would keep no
more than one multiprocessor for each of its KV heads at work."""

FEW_ROWS = 16
"""Query rows (tokens x query heads of a KV head) of a sequence: what one pass over its keys takes.
The parts of more would take memory, rows times chunks, and more rows keep a GPU busy anyway."""


class _Step(NamedTuple):
    """What attention takes beside the query and the layer, on the device of the query.

    A GPU is waited for when this is made, so not again for each layer.
    """

    tables: torch.Tensor
    seq_lens: torch.Tensor
    q_indptr: torch.Tensor
    plan: tierkv_kernels.Plan


class PagedPool:
    """Torch's view of a namespace's pool; made anew when the arena was mapped anew."""

    def __init__(self, namespace: NamespaceCore) -> None:
        self._namespace = namespace
        self._last = threading.local()
        self.dtype: torch.dtype = getattr(torch, namespace.spec.dtype)

    @property
    def blocks(self) -> torch.Tensor:
        """All slots: [slots, layers, 2, block_tokens, kv_heads, head_dim], K before V.

        Of layout HND it is a transposed view. Shares memory with the daemon and all other workers.
        """
        memory = self._namespace.memory
        found: torch.Tensor | None = memory.kept.get("blocks")
        if found is None:
            spec = self._namespace.spec
            found = memory.kept["blocks"] = tierkv_kernels.block_view(
                slots_tensor(memory.view),
                layers=spec.layers,
                block_size=spec.block_tokens,
                num_kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                dtype=self.dtype,
                layout=spec.layout,
            )
        return found

    def layer(self, layer: int) -> torch.Tensor:
        """One layer's K and V: [slots, 2, block_tokens, kv_heads, head_dim]."""
        layers = self._namespace.spec.layers
        if not 0 <= layer < layers:
            raise InvalidArgument(f"layer is {layer}; the model has {layers}")
        return self.blocks[:, layer]

    def write(
        self, layer: int, sequence: SequenceCore, first_token: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Scatter ``k`` and ``v``, each [n, kv_heads, head_dim], into the sequence's slots."""
        spec = self._namespace.spec
        shape = (len(k), spec.kv_heads, spec.head_dim)
        if k.shape != shape or v.shape != shape:
            raise InvalidArgument(
                f"k is {list(k.shape)} and v {list(v.shape)}; both must be {list(shape)}"
            )
        if not len(k):
            return
        sequence.about_to_write(first_token, len(k))
        positions = torch.arange(first_token, first_token + len(k))
        table = torch.tensor(sequence.table, dtype=torch.int64)
        slots = table[positions // spec.block_tokens].unsqueeze(1)
        rows = (positions % spec.block_tokens).unsqueeze(1)
        pair = torch.tensor([[0, 1]])
        target = self.layer(layer)
        values = torch.stack((k.detach(), v.detach()), 1).to(target.device, self.dtype)
        if self.dtype in _ONE_BYTE:
            # torch scatters no float8 on the CPU; the bytes are the same.
            target, values = target.view(torch.uint8), values.view(torch.uint8)
        target.index_put_((slots, pair, rows), values)

    def block_tables(
        self, sequences: Items[SequenceCore], seq_lens: Items[int] | torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Block tables (i32 [B, longest], padded with slot 0) and sequence lengths (i32 [B]).

        ``seq_lens`` defaults to the tokens of each sequence. Raises InvalidArgument when one is
        longer than its table.
        """
        lens = [s.num_tokens for s in sequences] if seq_lens is None else _integers(seq_lens)
        if len(lens) != len(sequences):
            raise InvalidArgument(f"{len(lens)} lengths for {len(sequences)} sequences")
        block_tokens = self._namespace.spec.block_tokens
        widths = [-(-length // block_tokens) for length in lens]
        tables = np.zeros((len(lens), max(widths, default=0)), np.int32)
        for row, (sequence, width) in enumerate(zip(sequences, widths, strict=True)):
            sequence.require_active()
            if sequence.namespace is not self._namespace:
                raise InvalidArgument(f"sequence {sequence.number} is of another namespace")
            room = len(sequence.table) * block_tokens
            if not 0 <= lens[row] <= room:
                raise InvalidArgument(
                    f"sequence {sequence.number} has room for {room} tokens, not {lens[row]}: "
                    "reserve first"
                )
            tables[row, :width] = sequence.table[:width]
        return torch.from_numpy(tables), torch.tensor(lens, dtype=torch.int32)

    def attend(self, layer: int, q: torch.Tensor, plan: AttendPlan) -> torch.Tensor:
        """Paged attention in this process."""
        pair = self.layer(layer)
        step = self._step_of(plan, q.device)
        out, _ = tierkv_kernels.paged_attention(
            q,
            pair[:, 0],
            pair[:, 1],
            step.tables,
            step.seq_lens,
            q_indptr=step.q_indptr,
            plan=step.plan,
            scale=plan.scale or None,
            causal=plan.causal,
            window=plan.window,
            softcap=plan.softcap,
        )
        return out

    def attend_in_daemon(self, q: torch.Tensor, plan: AttendPlan) -> Steps[torch.Tensor]:
        """The same in the daemon's process: takes the scratch memory of the connection."""
        out = torch.empty(q.shape, dtype=self.dtype)
        stored = q.detach().to("cpu", self.dtype).contiguous()
        yield from self._namespace.attend(plan, _bytes_of(stored), _bytes_of(out))
        return out.to(q.device, q.dtype)

    def _step_of(self, plan: AttendPlan, device: torch.device) -> _Step:
        """What the layers of a step share, kept for the next one.

        Each thread keeps its own, because a kernels' plan also holds the step's buffers. So does
        each stream of a GPU: torch gives freed memory away again in the order of one stream.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        arrays = (plan.tables, plan.seq_lens.astype(np.int32), plan.q_indptr.astype(np.int32))
        geometry = (plan.q_heads, plan.causal, plan.window)
        key = (*(array.tobytes() for array in arrays), *geometry, device, stream)
        if getattr(self._last, "key", None) != key:
            tables, seq_lens, q_indptr = (torch.from_numpy(array).to(device) for array in arrays)
            self._last.step = _Step(tables, seq_lens, q_indptr, self._kernel_plan(plan, device))
            self._last.key = key
        step: _Step = self._last.step
        return step

    def _kernel_plan(self, plan: AttendPlan, device: torch.device) -> tierkv_kernels.Plan:
        spec = self._namespace.spec
        q_lens = np.diff(plan.q_indptr.astype(np.int32))
        rows = int(q_lens.max(initial=0)) * plan.q_heads // spec.kv_heads
        return tierkv_kernels.plan(
            plan.seq_lens.astype(np.int32),
            q_lens,
            num_q_heads=plan.q_heads,
            num_kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            block_size=spec.block_tokens,
            split=GPU_SPLIT_TOKENS if device.type == "cuda" and rows <= FEW_ROWS else 0,
            causal=plan.causal,
            window=plan.window,
        )

    def plan(
        self,
        layer: int,
        q: torch.Tensor,
        sequences: Items[SequenceCore],
        seq_lens: Items[int] | torch.Tensor | None,
        q_indptr: Items[int] | torch.Tensor | None,
        *,
        scale: float | None,
        causal: bool,
        window: int,
        softcap: float,
    ) -> AttendPlan:
        """Check an attention's arguments; query rows default to one per sequence, or all to one.

        Raises InvalidArgument.
        """
        spec = self._namespace.spec
        if q.ndim != 3 or q.shape[2] != spec.head_dim or q.shape[1] % spec.kv_heads:
            raise InvalidArgument(
                f"q is {list(q.shape)}; it must be [tokens, a multiple of {spec.kv_heads} heads, "
                f"{spec.head_dim}]"
            )
        if q_indptr is not None:
            rows = _integers(q_indptr)
        elif len(sequences) == len(q):
            rows = list(range(len(q) + 1))
        elif len(sequences) == 1:
            rows = [0, len(q)]
        else:
            raise InvalidArgument(
                f"{len(q)} query rows for {len(sequences)} sequences: pass q_indptr"
            )
        if len(rows) != len(sequences) + 1 or rows[0] != 0 or rows[-1] != len(q):
            raise InvalidArgument(
                f"q_indptr is {rows}; it must run from 0 to {len(q)} in {len(sequences)} steps"
            )
        if any(later < earlier for earlier, later in itertools.pairwise(rows)):
            raise InvalidArgument(f"q_indptr is {rows}; it must not fall")
        tables, lens = self.block_tables(sequences, seq_lens)
        return AttendPlan(
            layer,
            list(sequences),
            tables.numpy(),
            lens.numpy().astype(np.uint32),
            np.array(rows, np.uint32),
            q.shape[1],
            scale or 0.0,
            causal,
            window,
            softcap,
        )


def slots_tensor(slots: U8 | GpuRows) -> torch.Tensor:
    """The slots as u8 [slots, stride], sharing their memory, where they lie."""
    if isinstance(slots, GpuRows):
        return torch.as_tensor(slots, device=f"cuda:{slots.memory.gpu.index}")
    return torch.from_numpy(slots)


def _bytes_of(tensor: torch.Tensor) -> U8:
    """A contiguous tensor's own bytes (u8 [n])."""
    found: U8 = tensor.view(-1).view(torch.uint8).numpy()
    return found


def _integers(values: Items[int] | torch.Tensor) -> list[int]:
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
