# ruff: noqa: E501, RUF001 (templates and tokens as they are published)
"""Model directories as published repositories and `save_pretrained` write them: their files' forms and values, tiny sizes.

Each is named by the repository whose files it follows. Weights are random, vocabularies are small; what the files say
beside sizes is what the published ones say.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

SAMPLE = [
    "The quick brown fox jumps over the lazy dog, 12345 times.",
    "naïve café 你好 世界 😀",
    "def f(x):\n\treturn x  # é",
]
SIZES: dict[str, Any] = {
    "vocab_size": 480, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.08, "torch_dtype": "float32",
}  # fmt: skip

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are "
    "a helpful assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for "
    "message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and "
    "system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' "
    "+ content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token "
    "}}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set "
    "content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = "
    "namespace(is_first=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set "
    "ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in "
    "messages %}{%- if message['role'] == 'user' %}{{'<U>' + message['content']}}{%- endif %}{%- if message['role'] == "
    "'assistant' and message['content'] is none %}{%- for tool in message['tool_calls'] %}{{'<CALL>' + tool['type'] + ':' + "
    "tool['function']['name'] + '\\n' + tool['function']['arguments'] + '</CALL>'}}{%- endfor %}{{'<END>'}}{%- endif %}{%- if "
    "message['role'] == 'assistant' and message['content'] is not none %}{{'<A>' + message['content'] + '<END>'}}{%- endif "
    "%}{%- if message['role'] == 'tool' %}{{'<OUT>' + message['content'] + '</OUT>'}}{%- endif %}{%- endfor -%}{% if "
    "add_generation_prompt %}{{'<A>'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == "
    "'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "'[/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% else %}{{ "
    "raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
TOOL_USE = (
    "{{ bos_token }}<tools>{{ tools | tojson }}</tools>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def token(text: str, **flags: bool) -> dict[str, Any]:
    """A token as files have it."""
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, **flags}


def by_bytes(special: Sequence[str], split: str | None, *, bos: str | None = None, digits: bool = False) -> Any:
    """GPT-2's kind with a split of its own, and its special tokens behind the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = []
    for pair in ("t h", "th e", "Ġ the", "Ġ f", "o x", "Ġf ox", "1 2", "12 3", "r e", "t u", "Ġ Ġ", "i n", "Ã ©"):
        first, second = pair.split()
        vocab.setdefault(first + second, len(vocab))
        merges.append((first, second))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=bos is not None))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split == QWEN_SPLIT:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    if bos is not None:
        number = backend.token_to_id(bos)
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B:1", [(bos, number)])
    return backend


def by_pieces(special: Sequence[str | AddedToken] = (), *, kind: str = "prepend", bos: bool = True) -> Any:
    """SentencePiece's kind with byte tokens, as Llama 2 has it: spaces become ▁ by a normalizer, or by Metaspace."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁"]
    words += list(dict.fromkeys("".join(SAMPLE[:1]) + "[]/INST<>SYwho\nAéfu{}x"))
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = []
    for pair in ("▁ t", "▁t h", "▁th e", "▁ f", "o x", "▁f ox", "▁ [", "I N", "S T", "▁ h", "▁ w"):
        first, second = pair.split()
        vocab.setdefault(first + second, len(vocab))
        merges.append((first, second))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    strip = [decoders.Strip(" ", 1, 0)]
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "replace":
        backend.normalizer, strip = normalizers.Sequence([normalizers.Replace(" ", "▁")]), []
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_special_tokens(list(special))
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B:1", [("<s>", 1)])
    return backend


class Published(NamedTuple):
    """One directory."""

    backend: Any
    config: Mapping[str, Any]  # of config.json, beside SIZES
    tokenizer: Mapping[str, Any] | None  # tokenizer_config.json; "added": with an added_tokens_decoder
    files: Mapping[str, Any] = {}  # other files: texts, or what becomes JSON
    shard: str = "1GB"


def _added(backend: Any) -> dict[str, Any]:
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {
        str(number): {flag: getattr(each, flag) for flag in flags}
        for number, each in sorted(backend.get_added_tokens_decoder().items())
    }


def write(path: Path, published: Published) -> Path:
    """The directory, with random weights."""
    import torch
    import transformers

    path.mkdir(parents=True, exist_ok=True)
    config = {**SIZES, **published.config}
    config = {name: value for name, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    made.float().save_pretrained(path, max_shard_size=published.shard)
    (path / "generation_config.json").unlink(missing_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    published.backend.save(str(path / "tokenizer.json"))
    if published.tokenizer is not None:
        said = dict(published.tokenizer)
        if said.pop("added", False):
            said["added_tokens_decoder"] = _added(published.backend)
        (path / "tokenizer_config.json").write_text(json.dumps(said, ensure_ascii=False, indent=2))
    for name, content in published.files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return path


def _llama(**more: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1,
            "rope_theta": 500000.0, "tie_word_embeddings": False, "use_cache": True, **more}  # fmt: skip


def _qwen(version: int, **more: Any) -> dict[str, Any]:
    own = {"head_dim": 16, "attention_bias": False} if version == 3 else {}
    return {"architectures": [f"Qwen{version}ForCausalLM"], "model_type": f"qwen{version}", "hidden_act": "silu",
            "attention_dropout": 0.0, "bos_token_id": 269, "eos_token_id": 271, "max_window_layers": 28,
            "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False,
            "tie_word_embeddings": False, "use_cache": True, "transformers_version": "4.43.1", **own, **more}  # fmt: skip


def _mistral(**more: Any) -> dict[str, Any]:
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "bos_token_id": 1,
            "eos_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 64,
            "tie_word_embeddings": False, "use_cache": True, "transformers_version": "4.34.0.dev0", **more}  # fmt: skip


def _phi3(**more: Any) -> dict[str, Any]:
    maps = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    return {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": maps, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "embd_pdrop": 0.0, "hidden_act": "silu", "pad_token_id": 2,
            "original_max_position_embeddings": 512, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
            "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, **more}  # fmt: skip


_L3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
       "<|python_tag|>"]  # fmt: skip
_IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_DS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<U>",
    "<A>",
    "<END>",
    "<CALL>",
    "</CALL>",
    "<OUT>",
    "</OUT>",
]
_PHI = ["<|endoftext|>", *(AddedToken(f"<|{name}|>", rstrip=True, normalized=False) for name in
        ("assistant", "system", "end", "user"))]  # fmt: skip
_ROPE3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
          "rope_type": "llama3"}  # fmt: skip
_L3_CONFIG = {"added": True, "bos_token": _L3[0], "eos_token": _L3[5], "clean_up_tokenization_spaces": True,
              "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
              "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": LLAMA3}  # fmt: skip
_QWEN_CONFIG = {"add_bos_token": False, "add_prefix_space": False, "added": True, "bos_token": None,
                "additional_special_tokens": _IM[1:], "chat_template": CHATML, "clean_up_tokenization_spaces": False,
                "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 131072, "pad_token": "<|endoftext|>",
                "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None}  # fmt: skip
_DS_CONFIG = {"add_bos_token": True, "add_eos_token": False, "bos_token": {"__type": "AddedToken", **token(_DS[0])},
              "eos_token": {"__type": "AddedToken", **token(_DS[1])}, "clean_up_tokenization_spaces": False,
              "legacy": True, "model_max_length": 16384, "pad_token": {"__type": "AddedToken", **token(_DS[1])},
              "sp_model_kwargs": {}, "unk_token": None, "tokenizer_class": "LlamaTokenizerFast",
              "chat_template": DEEPSEEK}  # fmt: skip
_L2_CONFIG = {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>", "pad_token": None,
              "clean_up_tokenization_spaces": False, "model_max_length": 4096, "sp_model_kwargs": {},
              "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"}  # fmt: skip
_L2_MAP = {name: token(text, normalized=True) for name, text in
           (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))}  # fmt: skip
_LONG = {
    "type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}


def directories() -> dict[str, Published]:
    """By name."""
    v3 = _mistral(sliding_window=None, rope_theta=1000000.0, transformers_version="4.42.0.dev0")
    return {
        "Llama-3.1-8B-Instruct": Published(
            by_bytes(_L3, LLAMA3_SPLIT, bos=_L3[0]),
            _llama(bos_token_id=269, eos_token_id=[270, 273, 274], rope_scaling=_ROPE3, transformers_version="4.42.3"),
            _L3_CONFIG,
            {"generation_config.json": {"bos_token_id": 269, "do_sample": True, "eos_token_id": [270, 273, 274],
                                        "temperature": 0.6, "top_p": 0.9},
             "special_tokens_map.json": {"bos_token": token(_L3[0]), "eos_token": token(_L3[5])}},
        ),
        "Llama-3.2-1B-Instruct": Published(
            by_bytes(_L3, LLAMA3_SPLIT, bos=_L3[0]),
            _llama(bos_token_id=269, eos_token_id=[270, 273, 274], head_dim=16, rope_scaling={**_ROPE3, "factor": 32.0},
                   tie_word_embeddings=True, transformers_version="4.45.0.dev0"),
            _L3_CONFIG,
        ),
        "Llama-2-7b-chat-hf": Published(
            by_pieces(),
            _llama(bos_token_id=1, eos_token_id=2, rope_theta=..., rope_scaling=None, transformers_version="4.32.0.dev0"),
            {**_L2_CONFIG, "legacy": False, "padding_side": "right", "chat_template": LLAMA2,
             **{name: {"__type": "AddedToken", **value} for name, value in _L2_MAP.items()}},
            {"special_tokens_map.json": _L2_MAP, "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2,
                                                                            "temperature": 0.6, "top_p": 0.9}},
        ),
        "TinyLlama-1.1B-Chat-v1.0": Published(
            by_pieces(),
            _llama(bos_token_id=1, eos_token_id=2, rope_theta=10000.0, rope_scaling=None),
            {**_L2_CONFIG, "added": True, "legacy": False, "model_max_length": 2048, "pad_token": "</s>",
             "padding_side": "right", "chat_template": "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
             "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' "
             "+ message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + "
             "message['content'] + eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ "
             "'<|assistant|>' }}\n{% endif %}\n{% endfor %}"},
        ),
        "vicuna-7b-v1.5": Published(  # with the token for padding that fine-tunes add, for which there is room
            by_pieces(),
            _llama(bos_token_id=1, eos_token_id=2, pad_token_id=0, rope_theta=..., max_sequence_length=4096),
            {**_L2_CONFIG, "pad_token": "[PAD]"},
            {"special_tokens_map.json": {**_L2_MAP, "pad_token": "[PAD]"}, "added_tokens.json": {"[PAD]": 470}},
        ),
        "Yi-1.5-6B-Chat": Published(
            by_pieces(["<|im_start|>", "<|im_end|>"], kind="replace", bos=False),
            _llama(bos_token_id=1, eos_token_id=2, rope_theta=5000000.0, pad_token_id=0),
            {**_L2_CONFIG, "add_bos_token": False, "added": True, "legacy": True, "add_prefix_space": False,
             "bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<unk>", "chat_template": CHATML},
        ),
        "Hermes-2-Pro-Llama-3-8B": Published(
            by_bytes([*_L3, *_IM[1:]], LLAMA3_SPLIT, bos=_L3[0]),
            _llama(bos_token_id=269, eos_token_id=277, rope_scaling=None),
            {**_L3_CONFIG, "eos_token": "<|im_end|>", "chat_template": [
                {"name": "default", "template": "{{bos_token}}" + CHATML}, {"name": "tool_use", "template": TOOL_USE}]},
        ),
        "SmolLM2-1.7B-Instruct": Published(
            by_bytes(_IM, None, digits=True),
            _llama(bos_token_id=270, eos_token_id=271, pad_token_id=271, rope_theta=130000, rope_scaling=None,
                   rope_interleaved=False, is_llama_config=True, tie_word_embeddings=True),
            {"add_prefix_space": False, "added": True, "additional_special_tokens": _IM[1:], "bos_token": "<|im_start|>",
             "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
             "model_max_length": 8192, "tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>",
             "chat_template": CHATML, "vocab_size": 49152},
        ),
        "DeepSeek-R1-Distill-Llama-8B": Published(
            by_bytes(_DS, LLAMA3_SPLIT, bos=_DS[0]),
            _llama(bos_token_id=269, eos_token_id=270, rope_scaling=_ROPE3),
            _DS_CONFIG,
        ),
        "DeepSeek-R1-Distill-Qwen-7B": Published(
            by_bytes(_DS, QWEN_SPLIT, bos=_DS[0]),
            _qwen(2, bos_token_id=269, eos_token_id=270, use_mrope=False),
            _DS_CONFIG,
            {"generation_config.json": {"_from_model_config": True, "bos_token_id": 269, "eos_token_id": 270,
                                        "do_sample": True, "temperature": 0.6, "top_p": 0.95}},
        ),
        "DeepSeek-R1-0528-Qwen3-8B": Published(
            by_bytes(_DS, QWEN_SPLIT, bos=_DS[0]),
            _qwen(3, bos_token_id=269, eos_token_id=270, rope_scaling={
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                "attn_factor": 0.8782488562869419}),
            _DS_CONFIG,
        ),
        "Qwen2.5-7B-Instruct": Published(
            by_bytes(_IM, QWEN_SPLIT), _qwen(2), _QWEN_CONFIG,
            {"generation_config.json": {"bos_token_id": 269, "pad_token_id": 269, "do_sample": True,
                                        "eos_token_id": [271, 269], "repetition_penalty": 1.05, "temperature": 0.7,
                                        "top_p": 0.8, "top_k": 20}},
            shard="60KB",
        ),
        "Qwen2.5-ChatML-finetune": Published(  # config.json and generation_config.json keep the base model's end token
            by_bytes(_IM, QWEN_SPLIT), _qwen(2, eos_token_id=269, use_sliding_window=True, sliding_window=32,
                                             max_window_layers=1), _QWEN_CONFIG,
            {"generation_config.json": {"eos_token_id": 269, "max_new_tokens": 2048}},
        ),
        "Qwen3-8B": Published(
            by_bytes([*_IM, "<think>"], QWEN_SPLIT), _qwen(3, transformers_version="4.51.0"),
            {**_QWEN_CONFIG, "chat_template": CHATML + "{% if enable_thinking is defined and not enable_thinking %}"
             "<think>\n\n</think>\n\n{% endif %}"},
            {"generation_config.json": {"do_sample": True, "eos_token_id": [271, 269], "temperature": 0.6, "top_k": 20}},
        ),
        "Qwen3-saved-by-transformers-5": Published(
            by_bytes(_IM, QWEN_SPLIT),
            {name: value for name, value in _qwen(
                3, dtype="float32", torch_dtype=..., rope_parameters={"rope_theta": 5000000, "rope_type": "default"},
                layer_types=["full_attention", "full_attention"], transformers_version="5.0.0", pad_token_id=None,
                tie_word_embeddings=True, sliding_window=None).items() if name != "rope_theta"},
            {"add_prefix_space": False, "backend": "tokenizers", "bos_token": None, "errors": "replace",
             "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "extra_special_tokens": _IM[1:],
             "is_local": False, "model_max_length": 1010000, "pad_token": "<|endoftext|>",
             "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None},
            {"chat_template.jinja": CHATML},
        ),
        "Mistral-7B-Instruct-v0.1": Published(
            by_pieces(), _mistral(), {**_L2_CONFIG, "added": True, "additional_special_tokens": [], "legacy": True,
                                      "spaces_between_special_tokens": False, "use_default_system_prompt": False,
                                      "chat_template": MISTRAL},
            {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}},
        ),
        "Mistral-7B-Instruct-v0.3": Published(
            by_pieces(["[INST]", "[/INST]", "[TOOL_CALLS]"], kind="metaspace"), v3,
            {**_L2_CONFIG, "added": True, "add_prefix_space": True, "legacy": False, "chat_template": [
                {"name": "default", "template": MISTRAL}, {"name": "tool_use", "template": TOOL_USE}]},
        ),
        "Mistral-Nemo-Instruct-2407": Published(
            by_bytes(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], LLAMA3_SPLIT, bos="<s>"),
            {**v3, "head_dim": 32, "bos_token_id": 270, "eos_token_id": 271},
            {"added": True, "add_bos_token": True, "add_eos_token": False, "add_prefix_space": False, "bos_token": "<s>",
             "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast",
             "clean_up_tokenization_spaces": False},
            {"chat_template.json": {"chat_template": MISTRAL}},
        ),
        "Ministral-8B-saved-by-transformers-5": Published(
            by_pieces(kind="metaspace"),
            {**_mistral(sliding_window=48), "architectures": ["MinistralForCausalLM"], "model_type": "ministral",
             "layer_types": ["full_attention", "sliding_attention"], "head_dim": 16},
            {"backend": "tokenizers", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "is_local": True,
             "tokenizer_class": "TokenizersBackend"},
            {"chat_template.jinja": MISTRAL, "additional_chat_templates/tool_use.jinja": TOOL_USE},
        ),
        "Phi-3-mini-4k-instruct": Published(
            by_pieces(_PHI, bos=False), _phi3(),
            {**_L2_CONFIG, "add_bos_token": False, "added": True, "eos_token": "<|endoftext|>", "legacy": False,
             "pad_token": "<|endoftext|>", "padding_side": "left", "chat_template": PHI3,
             "use_default_system_prompt": False},
            {"generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 300], "pad_token_id": 2},
             "added_tokens.json": {"<|end|>": 300}},
        ),
        "Phi-4-mini-instruct": Published(
            by_bytes(["<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>", "<|system|>"], LLAMA3_SPLIT),
            _phi3(full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False, partial_rotary_factor=0.75,
                  rope_scaling=_LONG, sliding_window=262144, tie_word_embeddings=True, attention_bias=False,
                  bos_token_id=269, eos_token_id=269, pad_token_id=269, original_max_position_embeddings=256,
                  max_position_embeddings=1024),
            {"add_bos_token": False, "add_eos_token": False, "add_prefix_space": False, "added": True,
             "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
             "unk_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer", "chat_template": PHI3},
        ),
        "an-unsloth-finetune": Published(
            by_bytes(_L3, LLAMA3_SPLIT, bos=_L3[0]),
            _llama(bos_token_id=269, eos_token_id=273, rope_scaling=_ROPE3, unsloth_version="2025.3.19",
                   unsloth_fixed=True, pad_token_id=275, torch_dtype=..., model_name="unsloth/Llama-3.1"),
            {**_L3_CONFIG, "pad_token": "<|finetune_right_pad_id|>", "padding_side": "left"},
        ),
    }  # fmt: skip


def _turns(user: str, assistant: str, *, first: str = "{{ bos_token }}", system: str = "", prompt: str) -> str:
    """A template of one turn after the other."""
    branches = "".join(
        f"{{% elif m['role'] == '{role}' %}}{said}"
        for role, said in (("system", system), ("assistant", assistant))
        if said
    )
    loop = f"{{% for m in messages %}}{{% if m['role'] == 'user' %}}{user}{branches}{{% endif %}}{{% endfor %}}"
    return first + loop + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


_ALTERNATE = (
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == "
    "'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
)
_GEMMA_PROMPT = "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set loop_messages = messages %}"
    + _ALTERNATE
    + "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}" + _GEMMA_PROMPT
)
GEMMA3 = (
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- if messages[0]['content'] is string -%}\n        "
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\n    {%- else -%}\n        {%- set first_user_prefix "
    "= messages[0]['content'][0]['text'] + '\n\n' -%}\n    {%- endif -%}\n    {%- set loop_messages = messages[1:] -%}\n"
    "{%- else -%}\n    {%- set first_user_prefix = '' -%}\n    {%- set loop_messages = messages -%}\n{%- endif -%}\n"
    + _ALTERNATE
    + "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}{%- if "
    "message['content'] is string -%}{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}{%- for item "
    "in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    + _GEMMA_PROMPT
)
GRANITE = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = "
    "messages[1:] %}{%- else %}{%- set system_message = 'Today\\'s Date: ' + strftime_now('%B %Y') + '.\nYou are Granite, "
    "developed by IBM.' %}{%- set loop_messages = messages %}{%- endif %}{{- '<|start_of_role|>system<|end_of_role|>' + "
    "system_message + '<|end_of_text|>\n' }}{%- for message in loop_messages %}{{- '<|start_of_role|>' + message['role'] + "
    "'<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}{%- if loop.last and add_generation_prompt %}{{- "
    "'<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}{%- endfor %}"
)
SMOLLM3 = (
    "{%- if messages[0].role == 'system' -%}{%- set said = messages[0].content | trim -%}{%- else -%}{%- set said = '' -%}"
    "{%- endif -%}{%- set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' -%}{{- "
    "'<|im_start|>system\n## Metadata\n\n' -}}{{- 'Reasoning Mode: ' + mode + '\n\n' + said + '<|im_end|>\n' -}}{%- for m "
    "in messages -%}{%- if m.role == 'user' -%}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{%- elif m.role == "
    "'assistant' -%}{% generation %}{{ '<|im_start|>assistant\n' + m.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{% endgeneration %}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
GLM4 = (
    "[gMASK]<sop>{%- if tools -%}<|system|>\n# 可用工具{% for tool in tools %}{%- set function = tool.function if "
    "tool.get('function') else tool %}\n\n## {{ function.name }}\n\n{{ function | tojson(indent=4, ensure_ascii=False) }}\n"
    "在调用上述函数时，请使用 Json 格式表示调用的参数。{%- endfor %}{%- endif -%}{%- for m in messages if m.role == 'system' %}"
    "<|system|>\n{{ m.content }}{%- endfor %}{%- for m in messages if m.role != 'system' %}{%- set meta = m.get('metadata', "
    "'') %}{%- if m.role == 'user' %}<|user|>\n{{ m.content }}{%- elif m.role == 'assistant' %}<|assistant|>{{ meta }}\n"
    "{{ m.content }}{%- elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATS: dict[str, tuple[Any, str, list[str]]] = {
    "qwen3_moe": (
        QWEN_SPLIT,
        CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
        _IM,
    ),
    "mixtral": (None, _turns("{{ ' [INST] ' + m['content'] + ' [/INST]' }}", "{{ ' ' + m['content'] + eos_token }}", prompt=""), []),
    "glm4_moe": (LLAMA3_SPLIT, _turns("<|user|>\n{{ m.content }}", "<|assistant|>\n{{ m.content }}", first="[gMASK]<sop>",
                                      system="<|system|>\n{{ m.content }}", prompt="<|assistant|>"),
                 ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]),
    "glm4": (LLAMA3_SPLIT, GLM4, ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
                                  "<|observation|>"]),
    "gemma2": (None, GEMMA2, ["<start_of_turn>", "<end_of_turn>"]),
    "gemma3_text": (None, GEMMA3, ["<start_of_turn>", "<end_of_turn>"]),
    "olmo2": (LLAMA3_SPLIT, _turns("{{ '<|user|>\n' + m['content'] + '\n' }}", "{{ '<|assistant|>\n' + m['content'] + eos_token }}"
                                   "{% if not loop.last %}{{ '\n' }}{% endif %}",
                                   system="{{ '<|system|>\n' + m['content'] + '\n' }}", prompt="{{ '<|assistant|>\n' }}"),
              ["<|endoftext|>"]),
    "granite": (None, GRANITE, ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"]),
    "smollm3": (LLAMA3_SPLIT, SMOLLM3, _IM),
    "deepseek_v2": (LLAMA3_SPLIT, _turns("{{ 'User: ' + m['content'] + '\n\n' }}", "{{ 'Assistant: ' + m['content'] + eos_token }}",
                                         system="{{ m['content'] + '\n\n' }}", prompt="{{ 'Assistant:' }}"), _DS),
    "deepseek_v3": (LLAMA3_SPLIT, DEEPSEEK, _DS),
}  # fmt: skip
"""By family: how text is split (None: into SentencePiece's pieces), the form of its published template, special tokens."""


def write_chat(path: Path, family: str) -> Path:
    """A directory with a family's tokenizer and template, without weights."""
    split, template, special = CHATS[family]
    backend = by_pieces(special) if split is None else by_bytes(special, split, bos=special[0])
    ends = (
        {"bos_token": "<s>", "eos_token": "</s>"}
        if split is None
        else {"bos_token": special[0], "eos_token": special[-1]}
    )
    backend.save(str(path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "add_bos_token": True, **ends}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    return path
