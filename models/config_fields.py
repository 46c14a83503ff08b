"""Which fields of a config.json the model code implements, which change nothing, and which are refused by name. No
torch.

A field that is silently ignored is a model that speaks fluently and says the wrong thing. So a field must be read by
`load_model_config`, be known to change nothing at inference, or have a value that switches its feature off.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import ModelError

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    """Names that white space parts."""
    return frozenset(text.split())


READ = _names(
    """
    architectures vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    partial_rotary_factor tie_word_embeddings attention_bias mlp_bias eos_token_id bos_token_id dtype torch_dtype
    original_max_position_embeddings hidden_act quantization_config
    """
)
"""Read, and checked, by `load_model_config`."""

HARMLESS = _names(
    """
    model_type transformers_version transformers.js_config tokenizer_class name_or_path license language
    unsloth_version unsloth_fixed is_llama_config custom_pipelines paddlenlp_version model_name bos_token eos_token
    pad_token unk_token output_past
    _name_or_path _commit_hash _from_auto _from_model_config _attn_implementation _attn_implementation_internal
    _attn_implementation_autoset _flash_attn_2_enabled _moe_implementation _experts_implementation

    initializer_range initializer_factor attention_dropout attn_pdrop attention_probs_dropout_prob hidden_dropout
    hidden_dropout_prob resid_pdrop residual_dropout embd_pdrop embedding_dropout dropout ffn_dropout
    classifier_dropout gradient_checkpointing use_gradient_checkpointing use_recompute neftune_noise_alpha
    pretraining_tp base_model_tp_plan base_model_pp_plan tensor_parallel_degree world_size loss_type ignore_index
    router_aux_loss_coef router_jitter_noise output_router_logits aux_loss_alpha seq_aux
    num_labels id2label label2id problem_type finetuning_task task_specific_params
    is_matryoshka matryoshka_dimensions

    use_cache cache_implementation return_dict use_return_dict output_attentions output_hidden_states
    output_scores return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder
    attn_implementation use_flash_attn use_flash_attn2 use_flash_attention use_flash_attention_2 flash_attn use_sdpa
    use_torch_sdpa model_max_length max_sequence_length max_seq_len max_seq_length seq_length seq_len

    pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id decoder_start_token_id im_start_id im_end_id
    max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences bad_words_ids
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens prefix generation_config
    """
)
"""Fields about the file, training, initialisation, generation defaults or the way to compute, not what is computed."""

_ROPE_READ = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"})
_ROPE_KIND_READS: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": _names("factor attention_factor attn_factor beta_fast beta_slow mscale mscale_all_dim truncate"),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
}
_MULTIPLIER = re.compile(r"(?:^|_)(?:multiplier|scale|scaling|factor)(?:_|$)|^(?:rotary_pct|rope_percent)$|^mup_")
_SHOWN_CHARS, _MESSAGE_CHARS = 80, 2000

_Check = Callable[[Any, Mapping[str, Any]], bool]


def _head_size(values: Mapping[str, Any]) -> float:
    """The head size from fields that may still be wrong: 0 if unknown."""
    try:
        return float(values.get("head_dim") or values["hidden_size"] / values["num_attention_heads"])
    except (KeyError, TypeError, ZeroDivisionError, ValueError):
        return 0.0


def _is_attention_scale(value: Any, values: Mapping[str, Any]) -> bool:
    """Granite's factor on q·k is the usual 1 / sqrt(head size)."""
    size = _head_size(values)
    return isinstance(value, float) and size > 0 and abs(value * size**0.5 - 1) < 1e-6


_OWN_CODE = {
    ("AutoConfig", "configuration_phi3.Phi3Config"),
    ("AutoModelForCausalLM", "modeling_phi3.Phi3ForCausalLM"),
    ("AutoTokenizer", "Xenova/gpt-4o"),
    *(("AutoConfig", f"configuration_deepseek.DeepseekV{n}Config") for n in (2, 3)),
    *(("AutoModel", f"modeling_deepseek.DeepseekV{n}Model") for n in (2, 3)),
    *(("AutoModelForCausalLM", f"modeling_deepseek.DeepseekV{n}ForCausalLM") for n in (2, 3)),
}
"""What `auto_map` says in checkpoints that came with code of their own, which transformers has taken over since."""


def _is_own_code(value: Any, values: Mapping[str, Any]) -> bool:
    return isinstance(value, dict) and all((name, str(code)) in _OWN_CODE for name, code in value.items())


_NEUTRAL: Mapping[str, _Check] = {
    "auto_map": _is_own_code,
    "full_attn_mod": lambda value, values: value == 1,  # Phi-4-mini: every layer has full attention
    "attention_multiplier": _is_attention_scale,
    "query_pre_attn_scalar": lambda value, values: value == _head_size(values),
    "layer_types": lambda value, values: isinstance(value, list) and set(map(str, value)) <= {"full_attention"},
    "activation": lambda value, values: value in ("swiglu", "silu"),  # Falcon3, beside hidden_act
    "hidden_activation": lambda value, values: value == "silu",
    "position_embedding_type": lambda value, values: value in ("rope", "rotary"),
}
"""Fields with a neutral value of their own; for all, null, false, and empty ones are neutral too."""


def check_fields(
    path: Path, architecture: str, values: Mapping[str, Any], ignored: Collection[str] = (), *, reads: str = ""
) -> None:
    """Refuse fields that the model code would ignore although they may change the model's output.

    Args:
        path: the config.json, for the message.
        ignored: fields that are unknown, and do not matter.
        reads: fields that the family reads beside READ, parted by spaces.

    Raises:
        ModelError: names all such fields and their values.
    """
    known = READ | HARMLESS | _names(reads)
    unknown = [name for name, value in values.items() if name not in known and not _is_neutral(name, value, values)]
    if dropped := [name for name in unknown if name in ignored]:
        logger.warning("%s: ignored, as --ignore-config-fields has it: %s", path, ", ".join(dropped))
    if rest := [name for name in unknown if name not in ignored]:
        raise ModelError(
            f"{path}: not supported for {architecture}, since ignoring it could give wrong tokens: "
            f"{clip(', '.join('field ' + _shown(name, values[name]) for name in rest), _MESSAGE_CHARS)}. "
            f"Where it does nothing: --ignore-config-fields {clip(','.join(rest), _MESSAGE_CHARS)}"
        )


def check_rope_fields(path: Path, kind: str, rope: Mapping[str, Any]) -> None:
    """Refuse RoPE parameters that the code for their kind does not implement.

    Raises:
        ModelError: names the first such field and its value.
    """
    read = _ROPE_READ | _ROPE_KIND_READS.get(kind, frozenset())
    for name, value in rope.items():
        if name not in read and not _is_neutral(name, value, rope):
            raise ModelError(
                f"{path}: field {_shown(name, value)} of the RoPE parameters is not supported for {kind!r}"
            )


def _is_neutral(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Whether the value switches the field's feature off."""
    if value is None or value is False or (isinstance(value, list | dict | str) and not value):
        return True
    check = _NEUTRAL.get(name)
    if check is not None:
        return check(value, values)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == (1 if _MULTIPLIER.search(name) else 0)


def _shown(name: str, value: Any) -> str:
    return f"{name!r} = {clip(repr(value), _SHOWN_CHARS)}"
