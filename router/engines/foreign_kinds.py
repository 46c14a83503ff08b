"""Servers of other engines that a router may use: their kinds, what each lacks, and their addresses."""

import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pdkv.base.options import TCP, did_you_mean
from pdkv.base.secret_options import MAX_FILE_BYTES, read_own_file, without_secrets
from pdkv.errors import ConfigError
from pdkv.router.engines.address import EngineAddress, Role
from pdkv.sampling.params import PARAMS_IN_BODIES, SamplingParams


class Kind(NamedTuple):
    """What servers of one kind do with POST /v1/completions and a prompt of token ids."""

    takes: tuple[str, ...]  # fields of SamplingParams, by their own names
    tells_ids: bool  # streams token ids; otherwise only text, which the router's tokenizer turns into tokens again
    takes_salt: bool  # keeps prefixes with different cache_salt apart
    health: str  # path of a page that answers while it can serve
    role: Role = "any"  # prefill and decode: they pass KV to one another by kv_transfer_params


_OF_ALL = ("temperature", "top_p")
_OF_MOST = (
    *_OF_ALL,
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "stop_token_ids", "ignore_eos"),
)
_VLLM = Kind((*_OF_MOST, "seed", "logprobs", "allowed_token_ids", "bad_words"), True, True, "/health")
KINDS: Mapping[str, Kind] = {
    "vllm": _VLLM,
    "vllm-prefill": _VLLM._replace(role="prefill"),
    "vllm-decode": _VLLM._replace(role="decode"),
    "sglang": Kind(_OF_MOST, True, True, "/health"),
    "openai": Kind(_OF_ALL, False, False, "/v1/models"),
}

BY_ROUTER = ("stop",)
"""What the router does itself, whatever its engines can do."""

OF_OUTPUT = ("presence_penalty", "frequency_penalty", "bad_words")
"""Parameters that concern the output alone: a server that gets a part of it as a prompt would apply them wrongly."""

HOPS = "x-pdkv-hops"
"""The header of requests that another deployment's fallback has sent: how many deployments they have left."""

_NEUTRAL = SamplingParams()

_SOURCE = re.compile(rf"{TCP}(?:/([0-9]{{1,5}}))?")
_URL = re.compile(
    r"https?://(?:\[([0-9a-f:.]+)\]|([0-9.]+)|[a-z0-9_.-]+)(?::[0-9]+)?(?:/[!-\"$->@-~]*)?", re.ASCII | re.IGNORECASE
)
_MORE = ("logprobs", "prompt_logprobs", "structured_outputs", "cache_salt", "pooling")


def lacks(kind: str) -> list[str]:
    """What requests cannot have there, by the names of their fields."""
    own = KINDS[kind]
    has = {*own.takes, *BY_ROUTER, *(("cache_salt",) if own.takes_salt else ())}
    return sorted({*PARAMS_IN_BODIES, *_MORE} - has)


def lacking(engines: Iterable[EngineAddress]) -> dict[str, str]:
    """What requests cannot have because an engine lacks it, and that engine with its kind."""
    foreign = [engine for engine in engines if is_foreign(engine.endpoint)]
    kinds = {engine.name: split_endpoint(engine.endpoint)[0] for engine in reversed(foreign)}
    return {field: f"{name} ({kind})" for name, kind in kinds.items() for field in lacks(kind)}


def missing(kind: str, params: SamplingParams, defaults: Mapping[str, Any]) -> str:
    """The first parameter that servers lack; "": none. Values of the model's `defaults` are no client's, and seeds are
    drawn where clients give none.
    """
    has = {*KINDS[kind].takes, *BY_ROUTER, "seed"}
    for name in (*PARAMS_IN_BODIES, "logprobs", "prompt_logprobs", "grammar", "pooling"):
        if name not in has and getattr(params, name) not in (getattr(_NEUTRAL, name), defaults.get(name)):
            return name
    return ""


def cannot_continue(params: SamplingParams) -> str:
    """The first parameter with which no other server can go on with a stream; "": none."""
    return next((name for name in OF_OUTPUT if getattr(params, name) != getattr(_NEUTRAL, name)), "")


def is_foreign(endpoint: str) -> bool:
    """Whether an endpoint is a server of another engine: KIND+URL."""
    return endpoint.partition("+")[0] in KINDS


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """The kind and the URL of such an endpoint."""
    kind, _, url = endpoint.partition("+")
    return kind, url


def read_backends(words: Sequence[str], option: str = "backend", kind: str = "") -> list[EngineAddress]:
    """The addresses of KIND=URL words; a word without a kind has that of the word before. Raises ConfigError."""
    numbers, found = Counter[str](), {}
    for word in words:
        if (named := re.match(r"([A-Za-z0-9_-]+)=", word)) is not None:
            kind, word = named[1], word[named.end() :]
        if kind not in KINDS:
            known = did_you_mean(kind, KINDS) or f"; known: {', '.join(KINDS)}"
            raise ConfigError(f"{option}: KIND=URL was expected, got the kind {kind!r}{known}")
        url = _checked(word, option)
        if url in found:
            raise ConfigError(f"{option}: {url} is given twice")
        found[url] = EngineAddress(f"{kind}-{numbers[kind]}", KINDS[kind].role, f"{kind}+{url}")
        numbers[kind] += 1
    roles = {address.role for address in found.values()}
    if roles and roles not in ({"any"}, {"prefill", "decode"}):
        raise ConfigError(
            f"{option}: vllm-prefill and vllm-decode need one another, and no other kind, got {', '.join(numbers)}"
        )
    return list(found.values())


def read_fallback(word: str) -> EngineAddress:
    """The address in [KIND=]URL; without a kind, a server of the kind openai. Raises ConfigError."""
    return msgspec.structs.replace(read_backends([word], "fallback", "openai")[0], name="fallback", role="fallback")


class Source(NamedTuple):
    """Where a server publishes its KV events, and where it repeats them ("": nowhere)."""

    events: str
    replay: str


def check_sources(texts: Mapping[str, str], backends: Sequence[EngineAddress]) -> None:
    """Raise ConfigError for events of a server that is not there, or has none."""
    names = {backend.name: split_endpoint(backend.endpoint)[0] for backend in backends}
    for name, text in texts.items():
        if name not in names:
            known = did_you_mean(name, names) or f"; known: {', '.join(names) or 'none'}"
            raise ConfigError(f"backend_kv_events: no server of --backend is called {name!r}{known}")
        if not KINDS[names[name]].tells_ids:
            raise ConfigError(f"backend_kv_events: {name} is a server of the kind openai, which has no KV events")
        read_source(text)


def read_source(text: str) -> Source:
    """The endpoints in tcp://HOST:PORT[/REPLAY_PORT]. Raises ConfigError."""
    found = _SOURCE.fullmatch(text)
    if found is None or "*" in found[1] or not all(1 <= int(port) < 65536 for port in found.groups()[1:] if port):
        raise ConfigError(f"backend_kv_events: tcp://HOST:PORT or tcp://HOST:PORT/REPLAY_PORT expected, got {text!r}")
    host, port, replay = found.groups()
    return Source(f"tcp://{host}:{port}", f"tcp://{host}:{replay}" if replay else "")


def check_backends(backends: Iterable[EngineAddress], key_file: Path | None, option: str = "backend") -> None:
    """Raise ConfigError if there is no HTTP client, or it cannot use a URL or the key."""
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError(f"--{option} needs httpx: pip install 'pdkv[backends]'")
    import httpx

    for backend in backends:
        _, url = split_endpoint(backend.endpoint)
        try:
            httpx.Request("GET", url).url.host.encode()  # of an international name, which it decodes
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"{option}: a server's URL was expected, got {url!r}: {error}") from None
    if key_file is not None:
        read_backend_key(key_file, option)


def read_backend_key(path: Path, option: str = "backend") -> str:
    """The API key in a file. Raises ConfigError."""
    key = read_own_file(path, f"the key file of --{option}-key-file", MAX_FILE_BYTES).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"the key file {path} must hold one line of ASCII: the key")
    return key


def _checked(text: str, option: str) -> str:
    """The URL without what is implied. Raises ConfigError."""
    try:
        found = _URL.fullmatch(text)
        is_good = found is not None and urlsplit(text).port != 0
        if found is not None and (address := found[1] or found[2]):
            ip_address(address)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(
            f"{option}: a server's URL such as http://10.0.0.2:8000, without a user (see --{option}-key-file), was "
            f"expected, got {without_secrets(text)!r}"
        )
    return text.rstrip("/").removesuffix("/v1")
