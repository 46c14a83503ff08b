"""Codecs by name. A codec's module is imported when it is used."""

from pdkv.base.registry import Registry
from pdkv.kv_store.codecs.base import Codec

CODECS: Registry[Codec] = Registry(
    "codec",
    "pdkv.kv_codecs",
    {
        "raw": "pdkv.kv_store.codecs.raw:RawCodec",
        "fp8": "pdkv.kv_store.codecs.scaled:Fp8Codec",
        "int8": "pdkv.kv_store.codecs.scaled:Int8Codec",
        "cachegen": "pdkv.kv_store.codecs.cachegen:CacheGenCodec",
    },
    "pdkv.kv_store.codecs.base:Codec",
)


def make_codec(name: str, level: int | None = None) -> Codec:
    """The codec of that name; level None: its default.

    Raises:
        ConfigError: unknown codec or level.
    """
    return CODECS.load(name)(level)
