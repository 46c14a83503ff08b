"""FlashInfer's wrapper for prompts over a paged KV cache, in torch: its documented arguments, by their names and order.

(BatchPrefillWithPagedKVCacheWrapper of flashinfer 0.2 to 0.6.) `WRONGS` is what another version might do with them.
"""

from itertools import pairwise
from types import ModuleType
from typing import Any, Literal

import torch

from pdkv.kernels.paged_attention import paged_attention_reference

Wrong = Literal["causal", "window", "layout", "raises", "zeros", "neighbour", "before", "scale"]
WRONGS: tuple[Wrong, ...] = ("causal", "window", "layout", "raises", "zeros", "neighbour", "before", "scale")
"""Queries start with the sequence; a window has one key more; pages are read as NHD; the kernel does not start;
nothing is computed; a neighbour's KV weighs 0, which makes NaN of NaN, or that before a window; the scale is another.
"""


class TwinModule(ModuleType):
    """Counts plans and runs."""

    __version__ = "0.0.twin"

    def __init__(self, wrong: Wrong | None = None) -> None:
        super().__init__("flashinfer")
        self.wrong = wrong
        self.plans: list[BatchPrefillWithPagedKVCacheWrapper] = []  # the wrapper of each
        self.num_runs = self.num_wrappers = 0

    def BatchPrefillWithPagedKVCacheWrapper(  # a class there
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *buffers: torch.Tensor | None,
        backend: str = "auto",
    ) -> "BatchPrefillWithPagedKVCacheWrapper":
        assert float_workspace_buffer.dtype == torch.uint8
        assert not use_cuda_graph
        assert not buffers
        assert backend == "auto"
        self.num_wrappers += 1
        return BatchPrefillWithPagedKVCacheWrapper(self, kv_layout)


class BatchPrefillWithPagedKVCacheWrapper:
    """Made by the module."""

    def __init__(self, module: TwinModule, kv_layout: str) -> None:
        assert kv_layout in ("NHD", "HND")
        self._module = module
        self._kv_layout = kv_layout

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Of everything given, and what the tests' steps have no use for is not given."""
        index = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(tensor.dtype == torch.int32 and tensor.device.type == "cpu" for tensor in index)
        assert causal
        assert (head_dim_vo, custom_mask, packed_custom_mask) == (None, None, None)
        assert (pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap) == ("NONE", False, None)
        self._module.plans.append(self)
        self._dtypes = q_data_type, kv_data_type
        self._shape = num_qo_heads, num_kv_heads, page_size, head_dim_qk
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._window = None if window_left == -1 else window_left + 1
        num_pages = paged_kv_indptr.diff()
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        self._qo_indptr = qo_indptr.clone()
        self._seq_lens = (num_pages - 1) * page_size + paged_kv_last_page_len
        pages = [paged_kv_indices[a:b] for a, b in pairwise(paged_kv_indptr.tolist())]
        self._tables = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        assert not options
        self._module.num_runs += 1
        kv = torch.stack(paged_kv_cache, 1) if isinstance(paged_kv_cache, tuple) else paged_kv_cache
        heads, kv_heads, page_size, head_size = self._shape
        page = (kv_heads, page_size) if self._kv_layout == "HND" else (page_size, kv_heads)
        assert kv.shape[1:] == (2, *page, head_size)
        assert q.shape == (int(self._qo_indptr[-1]), heads, head_size)
        assert (q.dtype, kv.dtype) == self._dtypes
        return self._attend(q, kv if self._kv_layout == "HND" else kv.transpose(2, 3))

    def _attend(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        wrong, window, seq_lens, scale = self._module.wrong, self._window, self._seq_lens, self._scale
        if wrong == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        if wrong == "zeros":
            return torch.zeros_like(q)
        if wrong == "layout":
            kv = kv.transpose(2, 3).reshape(kv.shape)
        if wrong == "causal":
            seq_lens = torch.minimum(seq_lens, self._qo_indptr.diff())
        if wrong == "window" and window is not None:
            window += 1
        if wrong == "scale":
            scale *= 1.1
        index = self._tables, seq_lens, self._qo_indptr, scale
        out = paged_attention_reference(q, kv.unsqueeze(1), 0, *index, window=window)
        if wrong == "before":
            out += 0.0 * paged_attention_reference(q, kv.unsqueeze(1), 0, *index)
        return out + 0.0 * kv[:, 1].sum() if wrong == "neighbour" else out
