"""vLLM's options that have another name in pdkv, or none: one table for the command line, `LLM(...)` and
docs/from-vllm.md.

Options with the same name and meaning are not listed; other words for their values are in `also=` of the option itself.
"""

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from pdkv.errors import ConfigError


class Theirs(NamedTuple):
    """One of vLLM's options."""

    ours: str = ""  # the equivalent option here
    neutral: tuple[Any, ...] = ()  # values that are accepted and change nothing; None and empty ones always are
    advice: str = ""  # what to do instead of any other value; {name} stands for an option here

    @property
    def is_switch(self) -> bool:
        """Whether the option's value is true or false."""
        return any(isinstance(value, bool) for value in self.neutral)

    def accepts(self, value: Any) -> bool:
        """Whether the value has no effect, like an empty one. `value`: a program's value, or text."""
        text = str(value).lower()
        neutral = ("none", "{}", "[]", "()", *(str(neutral).lower() for neutral in self.neutral))
        return text in neutral or value in self.neutral


_ALIASES = {
    "tensor_parallel_size": "tp",
    "tool_call_parser": "tool_parser",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "allowed_origins": "cors_origin",
    "otlp_traces_endpoint": "otlp_endpoint",
    "uvicorn_log_level": "log_level",
    "h11_max_header_count": "max_headers",
    "timeout_keep_alive": "idle_timeout_s",
    "model_tag": "model",
}

_ON, _OFF, _ANY, _NONE = (True,), (False,), (True, False), ()
_TEXT_ONLY = "models read and write text here, and nothing else"
_ALL_TASKS = "models generate text, embed it and rank it here, all of them always"
_NO_ADAPTERS = "adapters are not served: merge the adapter into the model's weights"
_ENGINES = "replicas are engines here: {prefill} N, {decode} M"
_ELSEWHERE = "engines of other hosts are started by `pd engine` and named by {remote_engines}"
_NO_COUNTERPART = "it has no counterpart here: leave it out"

# fmt: off
_OTHERS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("enable_chunked_prefill", _ON, "prompts are always computed in chunks of up to {max_num_batched_tokens} tokens"),
    ("enable_auto_tool_choice", _ON, "{tool_parser} none turns calls off"),
    ("async_scheduling", _ON, "{max_steps_ahead} 0 plans no step ahead"),
    ("enable_prompt_tokens_details", _ON, "usage always tells how many tokens of the prompt were cached"),
    ("enable_request_id_headers", _ON, "answers always have the header x-request-id"),
    ("disable_log_stats disable_log_requests aggregate_engine_logging use_tqdm_on_load", _ANY, ""),
    ("disable_custom_all_reduce disable_cascade_attn", _ANY, ""),
    ("attention_backend", ("auto", "triton", "TRITON_ATTN"), "pdkv's own kernels are the only ones: leave it out"),
    ("seed", (0,), "a seed belongs to a request: give it there"),
    ("swap_space", (0, 4), "{kv_host_memory} SIZE keeps KV of preempted requests in host memory"),
    ("cpu_offload_gb", (0,), "weights are not offloaded: use more ranks ({tp}) or a quantized checkpoint"),
    ("max_logprobs", (20,), "requests may ask for 20 logprobs a token, no other bound can be set"),
    ("scheduling_policy", ("fcfs", "priority"), "requests run by their priority, and in turn where it is equal"),
    ("pipeline_parallel_size", (1,), "layers are not split: use more ranks ({tp}) or engines ({prefill}, {decode})"),
    ("decode_context_parallel_size", (1,), "the context of a request is not split: leave it out"),
    ("data_parallel_size data_parallel_size_local", (1,), _ENGINES),
    ("api_server_count", (1,), "one router serves all engines"),
    ("nnodes", (1,), _ELSEWHERE),
    ("distributed_executor_backend", ("mp", "uni"), "ranks are processes of this host: leave it out"),
    ("tokenizer_mode", ("auto", "hf", "fast"), "the tokenizer is read from the model directory's tokenizer.json"),
    ("load_format", ("auto", "safetensors"), "weights are read from *.safetensors files only"),
    ("config_format", ("auto", "hf"), "the model is read from config.json only"),
    ("model_impl", ("auto", "vllm"), "docs/models.md lists the architectures that are served"),
    ("task runner convert", ("auto", "generate", "none", "embed", "embedding", "pooling"), _ALL_TASKS),
    ("guided_decoding_backend", ("auto", "guidance"), "llguidance is the only backend of structured outputs"),
    ("response_role", ("assistant",), "answers have the role assistant"),
    ("stream_interval", (1,), "each token is sent when it is there"),
    ("max_num_partial_prefills", (1,), "as many prompts as fit share a step: leave it out"),
    ("max_long_partial_prefills", (1,), "{long_prefill_token_threshold} bounds what a long prompt takes of a step"),
    ("trust_remote_code", _OFF, "no code of a model directory is ever run; docs/models.md lists what is served"),
    ("enable_lora enable_lora_bias", _OFF, _NO_ADAPTERS),
    ("enable_expert_parallel enable_eplb enable_dbo", _OFF, "experts are split by their neurons over ranks (tp)"),
    ("enable_mm_embeds enable_prompt_embeds interleave_mm_strings skip_mm_profiling", _OFF, _TEXT_ONLY),
    ("enable_log_requests enable_log_outputs enable_log_deltas", _OFF,
     "{access_log} logs a line a request, which never holds what was said"),
    ("disable_uvicorn_access_log", _OFF, "{no_access_log} leaves these log lines out"),
    ("enable_ssl_refresh", _OFF, "kill -HUP PID has certificates read again"),
    ("enable_force_include_usage", _OFF, "a request asks for usage by stream_options"),
    ("return_tokens_as_token_ids tokens_only", _OFF, "requests ask for ids, by their fields of similar names"),
    ("disable_fastapi_docs", _OFF, "/docs and /openapi.json are always served"),
    ("skip_tokenizer_init", _OFF, "the tokenizer is needed: stop strings and answers are text"),
    ("disable_sliding_window disable_hybrid_kv_cache_manager", _OFF, "windows of attention are part of the model"),
    ("calculate_kv_scales", _OFF, "an FP8 cache takes its scales from the checkpoint"),
    ("allow_credentials", _OFF, "{cors_origin} allows browsers of other origins, without credentials"),
    ("enable_sleep_mode kv_sharing_fast_prefill enable_server_load_tracking enable_tokenizer_info_endpoint headless "
     "exclude_tools_when_tool_choice_none log_error_stack disable_chunked_mm_input", _OFF, _NO_COUNTERPART),
    ("tokenizer tokenizer_revision", _NONE, "the tokenizer is that of the model directory"),
    ("revision", _NONE, "a revision is part of the model's name: {model} ORG/NAME@REVISION"),
    ("code_revision download_dir hf_token ignore_patterns", _NONE,
     "models come from huggingface_hub, which is told by its variables: HF_HOME, HF_TOKEN, HF_ENDPOINT"),
    ("hf_overrides hf_config_path rope_scaling rope_theta override_attention_dtype", _NONE,
     "what config.json says holds: change it there"),
    ("override_generation_config default_chat_template_kwargs", _NONE,
     "the defaults of requests are in the model's generation_config.json: change them there"),
    ("kv_transfer_config ec_transfer_config", _NONE,
     "{connector} NAME and {connector_config} KEY=VALUE choose the hand-off; one launch starts both sides"),
    ("kv_events_config", _NONE, "the router follows what engines cache by itself: leave it out"),
    ("kv_offloading_size kv_offloading_backend", _NONE,
     "{kv_host_memory} SIZE keeps KV in host memory, {kv_store} URL in a store"),
    ("num_gpu_blocks_override", _NONE, "{kv_cache_memory} SIZE sets the pool"),
    ("speculative_model num_speculative_tokens spec_method spec_model spec_tokens", _NONE,
     "it is a key of {speculative_config} JSON"),
    ("compilation_config cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture "
     "optimization_level", _NONE, "steps are CUDA graphs unless {enforce_eager} is given: leave it out"),
    ("lora_modules max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size fully_sharded_loras",
     _NONE, _NO_ADAPTERS),
    ("limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb media_io_kwargs allowed_local_media_path "
     "allowed_media_domains", _NONE, _TEXT_ONLY),
    ("pooler_config override_pooler_config", _NONE, "--pooling, or LLM.embed(pooling=...), says how states are pooled"),
    ("api_key", _NONE, "keys are in a file: `pd key new NAME --append FILE`, then {api_key_file} FILE"),
    ("allowed_methods allowed_headers", _NONE, "{cors_origin} allows all methods and headers to other origins"),
    ("log_config_file max_log_len", _NONE, "{log_level} and {log_format} say what is logged"),
    ("collect_detailed_traces show_hidden_metrics_for_version", _NONE, "{otlp_endpoint} URL sends spans"),
    ("tool_server", _NONE, 'a parser of your own is {tool_parser} "module:Class" or {tool_parser_plugin} FILE'),
    ("logits_processor_pattern", _NONE, '{logits_processors} "module:Class" names those that requests may ask for'),
    ("h11_max_incomplete_event_size", _NONE, "{max_header_bytes} and {max_body_bytes} bound a request"),
    ("root_path middleware ssl_ciphers", _NONE, "a proxy in front does this"),
    ("data_parallel_address data_parallel_rpc_port data_parallel_rank data_parallel_start_rank data_parallel_backend "
     "master_addr master_port node_rank", _NONE, _ELSEWHERE),
    ("structured_outputs_config", _NONE, "llguidance is the only backend of structured outputs"),
    ("additional_config worker_cls worker_extension_cls scheduler_cls attention_config prefix_caching_hash_algo "
     "model_loader_extra_config max_parallel_loading_workers num_lookahead_slots all2all_backend eplb_config "
     "mamba_cache_dtype mamba_block_size", _NONE, _NO_COUNTERPART),
)
"""Names, values that have no effect here, and the advice for all others."""
# fmt: on

UNSUPPORTED = {
    name: Theirs(neutral=neutral, advice=advice) for names, neutral, advice in _OTHERS for name in names.split()
}
"""Options without an equivalent here, by their Python names."""

VLLM = {name: Theirs(ours) for name, ours in _ALIASES.items()} | UNSUPPORTED
"""All of vLLM's options."""

SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
"""vLLM's short flags."""


def own_name(name: str, value: Any, known: Collection[str], show: Callable[[str], str] = str) -> str | None:
    """pdkv's name of vLLM's option `name`, possibly with a role before it.

    Args:
        known: pdkv's options.
        show: how a name is written in messages, such as "--kv-store".

    Returns:
        The name; "" if that value has no effect here; None if vLLM has no such option.

    Raises:
        ConfigError: this value is not supported; the message says what to do instead.
    """
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    role = "" if name in VLLM else next((role for role in ("prefill_", "decode_") if name.startswith(role)), "")
    theirs = VLLM.get(name.removeprefix(role))
    if theirs is None or (theirs.ours and role + theirs.ours not in known):
        return None
    if theirs.ours:
        return role + theirs.ours
    if theirs.accepts(value):
        return ""
    advice = re.sub(r"\{(\w+)}", lambda found: show(found[1]), theirs.advice)
    given = "" if value is True else f" {value}" if isinstance(value, str | int | float) else f" {value!r}"
    raise ConfigError(f"{show(name)}{given} is not supported: {advice}")
