"""Core attention over packed rows (THD): causal within a row, blind between rows.

A drop-in for the `core_attention` submodule of megatron-core's local layer spec, which has no packed
attention of its own. The call shape is that of Transformer Engine's, which takes its place on GPUs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gyre_trainer.megatron_core import MegatronModule


class PackedAttention(MegatronModule):
    """Scaled dot-product attention, one causal segment a row of `packed_seq_params.cu_seqlens_q`."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        **unused,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """query [t, heads, d], key and value [t, groups, d] -> [t, heads * d]. Masks are not used."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        rows = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._row(*row) for row in rows]).flatten(1)

    def _row(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=query.size(1) != key.size(1)
        )
        return out.squeeze(0).transpose(0, 1)
