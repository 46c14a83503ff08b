"""What config.json says about attention over latent KV (MLA). No torch."""

from typing import NamedTuple

from pdkv.errors import ModelError
from pdkv.models.json_fields import Fields
from pdkv.models.rope_config import read_rope, yarn_magnitude

LATENT_FIELDS = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave"
_MOST_ROW = 1024


class Latent(NamedTuple):
    """Sizes of attention in which a token's KV is one row: a latent of `rank` numbers, and `turned` rotated ones."""

    query_rank: int | None  # of the latent that queries are made of; None: they are made of the hidden state
    rank: int
    plain: int  # numbers of a query's head that are not rotated
    turned: int
    value: int  # numbers of a head's result
    interleaved: bool  # neighbours are rotated by one angle, and not numbers half a vector apart

    @property
    def row(self) -> int:
        """Numbers of a token's KV in one layer."""
        return self.rank + self.turned


def read_latent(fields: Fields) -> Latent:
    """Raises ModelError, which names the field."""
    query_rank = None if fields.values.get("q_lora_rank") is None else fields.count("q_lora_rank")
    plain, turned = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    rank, heads = fields.count("kv_lora_rank"), fields.count("num_attention_heads")
    if (kv_heads := fields.count("num_key_value_heads", heads)) != heads:
        raise ModelError(f"{fields.path}: num_key_value_heads {kv_heads} is not num_attention_heads, {heads}")
    if (size := fields.count("qk_head_dim", plain + turned)) != plain + turned:
        raise ModelError(f"{fields.path}: qk_head_dim {size} is not qk_nope_head_dim + qk_rope_head_dim")
    if rank % 2 or rank + turned > _MOST_ROW:
        raise ModelError(
            f"{fields.path}: kv_lora_rank {rank} must be even, and with qk_rope_head_dim {turned} at most {_MOST_ROW}"
        )
    return Latent(
        query_rank=query_rank,
        rank=rank,
        plain=plain,
        turned=turned,
        value=fields.count("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
    )


def read_scale(fields: Fields, latent: Latent) -> float:
    """The factor of logits: YaRN with `mscale_all_dim` changes it. Raises ModelError."""
    values = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    scaling = read_rope(fields, latent.turned).scaling
    share = Fields(fields.path, values).number("mscale_all_dim", 0.0)
    factor = yarn_magnitude(scaling.factor, share) ** 2 if scaling is not None and share else 1.0
    return float((latent.plain + latent.turned) ** -0.5 * factor)
