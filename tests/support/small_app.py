"""The router's application in front of a fake dispatcher, with a small tokenizer and no model."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import small_tokenizers
from fake_dispatcher import FakeDispatcher
from starlette.applications import Starlette

from pdkv.config import RouterConfig
from pdkv.models.config import ModelConfig
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.http.app import create_app, served_model
from pdkv.router.http.read.served_model import ServedModel
from pdkv.text import Tokenizer

MODEL = "small"
MAX_MODEL_LEN = 128
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level, without special tokens around a prompt."""
    return Tokenizer(small_tokenizers.byte_level_backend(), chat_template=TEMPLATE)


def eos() -> int:
    """The end of sequence."""
    return tokenizer().encode("</s>")[0]


def ids(text: str) -> list[int]:
    """One token per byte."""
    by_bytes = _ids_by_bytes()
    return [by_bytes[bytes([b])] for b in text.encode()]


@functools.cache
def _ids_by_bytes() -> dict[bytes, int]:
    return {tokenizer().token_bytes(i): i for i in range(tokenizer().vocab_size)}


@functools.cache
def model_config() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer().vocab_size,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        intermediate_size=8,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rotary_size=8,
        rope_scaling=None,
        tie_word_embeddings=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        fused_weights=False,
        eos_token_ids=(eos(),),
        bos_token_id=None,
        dtype="float32",
        windows=(None,),
    )


def make_app(dispatcher: FakeDispatcher, **options: Any) -> Starlette:
    """The application; `limits`, `api`, `access` and `autoscaling` are parts of its configuration."""
    names = {"limits": "http", "api": "api", "access": "access", "autoscaling": "autoscaling"}
    config = RouterConfig(**{part: options.pop(name) for name, part in names.items() if name in options})
    of_model = "max_model_len", "sampling_defaults", "logits_processors", "lacks"
    model = served(api=config.api, **{name: options.pop(name) for name in of_model if name in options})
    return create_app(cast(Dispatcher, dispatcher), model, config=config, **options)


def served(max_model_len: int | None = None, names: Sequence[str] = (MODEL,), **options: Any) -> ServedModel:
    """The model of these applications."""
    return served_model(tokenizer(), model_config(), names, max_model_len, **options)
