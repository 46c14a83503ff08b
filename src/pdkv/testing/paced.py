"""Profiles of paced engines, and their answers: a pure function of the tokens. No torch (docs/testing.md)."""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pdkv.base.options import Options, from_fields, option, options_of
from pdkv.config import DEFAULT_MODEL, PACED
from pdkv.errors import ConfigError, ModelError
from pdkv.models.config import ModelConfig, load_model_config
from pdkv.models.identity import ModelSource

Words = NDArray[np.uint64]
Ints = NDArray[np.integer[Any]]

PROFILES = Path(__file__).parent / "profiles"
GRANULE: Final = 16
"""Tokens of which a step looks at one: those of a block, or a part of them for larger blocks."""

_VERSION = 1  # of stamps and answers
_ANSWERS = range(2, 512)  # the default model's tokens that are not special
_FACTOR = 0xD1342543DE82EF95  # odd, so that it has an inverse
_MIX, _MIX_AGAIN, _WORD = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1
_ANSWER, _WEIGHT, _MASK = (int.from_bytes(name, "little") for name in (b"answers_", b"weights_", b"masks___"))


class Profile(Options):
    """A kind of engine: the duration of its steps, and the shape of its KV. A TOML file must have all fields without a
    default.
    """

    step_s: Annotated[float, Meta(gt=0, le=60)] = option(help="of any step that computes something")
    row_s: Annotated[float, Meta(ge=0, le=60)] = option(help="for each request that decodes")
    prompt_token_s: Annotated[float, Meta(ge=0, le=60)] = option(help="for each token of a prompt")
    context_token_s: Annotated[float, Meta(ge=0, le=60)] = option(
        help="for each token that a request has in the cache after the step"
    )
    num_layers: Annotated[int, Meta(ge=1, le=1024)] = option(help="of the KV")
    num_kv_heads: Annotated[int, Meta(ge=1, le=1024)] = option(help="of the KV")
    head_size: Annotated[int, Meta(ge=8, le=4096, multiple_of=8)] = option(
        help="float32 values of a head in K, and in V"
    )
    max_model_len: Annotated[int, Meta(ge=16, le=1 << 24)] = option(help="most tokens of prompt + output")
    vocab_size: Annotated[int, Meta(ge=_ANSWERS.stop, le=1 << 24)] = option(help="token ids that prompts may have")
    transfer_s: Annotated[float, Meta(ge=0, le=60)] = option(0.0, "of a hand-off, whatever its size (simulator)")
    transfer_token_s: Annotated[float, Meta(ge=0, le=60)] = option(
        0.0, "for each token of a hand-off, on the links of both engines (simulator)"
    )
    host_token_s: Annotated[float, Meta(ge=0, le=60)] = option(
        0.0, "for each token that is read from host memory, or saved to it (simulator)"
    )
    request_s: Annotated[float, Meta(ge=0, le=60)] = option(
        0.0, "of a request beside its steps: HTTP, routing, messages (simulator)"
    )
    prompt_s: Annotated[float, Meta(ge=0, le=60)] = option(
        0.0, "for each prompt, in which its engine computes nothing else (simulator)"
    )
    kv_tokens: Annotated[int, Meta(ge=16, le=1 << 30)] = option(131_072, "that an engine's pool holds (simulator)")

    def seconds(self, num_rows: int, num_prompt_tokens: int, num_context_tokens: int) -> float:
        """The step-time curve."""
        own = self.step_s + self.row_s * num_rows
        return own + self.prompt_token_s * num_prompt_tokens + self.context_token_s * num_context_tokens

    @property
    def identity(self) -> str:
        """The digest of the profile's values, which serves as the model's identity in KV keys and on cards."""
        facts = json.dumps([_VERSION, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.blake2b(facts.encode(), digest_size=16, person=b"pdkv-paced").hexdigest()

    @property
    def model_config(self) -> ModelConfig:
        """The model as other parts see it: the default model's tokenizer, with this KV."""
        return dataclasses.replace(
            load_model_config(DEFAULT_MODEL),
            num_layers=self.num_layers,
            num_heads=self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            max_position_embeddings=self.max_model_len,
            vocab_size=self.vocab_size,
            windows=(None,) * self.num_layers,
        )


def read_profile(model: Path) -> Profile:
    """The profile that `paced:NAME` or `paced:/path/to/profile.toml` means.

    Raises:
        ModelError: an unknown name, an unreadable file, a missing or unknown field, or a wrong value; the message has
            the known names, or the file, the field and its value.
    """
    name = str(model).removeprefix(PACED)
    known = {path.stem: path for path in sorted(PROFILES.glob("*.toml"))}
    file = known.get(name, Path(name).expanduser())
    if name not in known and "/" not in name and file.suffix != ".toml":
        raise ModelError(f"unknown profile {name!r} in --model {model}; known: {', '.join(known)}, or a TOML file")
    try:
        values = tomllib.loads(file.read_text())
        missing = [n for n, o in options_of(Profile).items() if o.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ModelError(f"{file}: field {missing[0]!r} is missing: {options_of(Profile)[missing[0]].help}")
        return from_fields(Profile, values, owner=str(file))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of tomllib and decode()
        raise ModelError(f"{file}: malformed: {error}") from None
    except ConfigError as error:
        raise ModelError(str(error)) from None


class PacedSource(ModelSource):
    """Stands in for a model's weight files: a paced model has none."""

    files = None  # type: ignore[assignment]

    def __init__(self, path: Path, config: ModelConfig | None = None) -> None:
        """Raises ModelError as in `read_profile`."""
        self._identity = read_profile(path).identity

    def known(self) -> str:
        """The identity."""
        return self._identity

    identity = known

    def close(self) -> None:
        """No effect: nothing is open."""


def mixed(words: Words) -> Words:
    """Each word's bits spread over all 64 (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
    return words ^ (words >> np.uint64(31))


class Stamps:
    """The content of a pool's rows: at position p of a request the chain c(p) = A * c(p - 1) + mixed(token + 1), modulo
    2^64, with c(-1) = 0. Each word is XORed with the mask of its layer, side (K or V) and head.
    """

    def __init__(self, profile: Profile) -> None:
        shape = profile.num_layers, 2 * profile.num_kv_heads
        self.masks = mixed(np.arange(1, 1 + shape[0] * shape[1], dtype=np.uint64) + np.uint64(_MASK)).reshape(shape)
        self._factor = np.uint64(_FACTOR)
        powers = np.full(profile.max_model_len, _FACTOR, np.uint64)
        inverses = np.full(profile.max_model_len, pow(_FACTOR, -1, 1 << 64), np.uint64)
        powers[0] = inverses[0] = 1
        self._powers, self._inverses = np.multiply.accumulate(powers), np.multiply.accumulate(inverses)
        self._tokens = mixed(np.arange(1, 1 + profile.vocab_size, dtype=np.uint64))
        counts = shape[0], -(-profile.max_model_len // GRANULE)
        numbers = np.arange(counts[0] * counts[1], dtype=np.uint64) + np.uint64(_WEIGHT)
        self.weights: Words = (mixed(numbers) | np.uint64(1)).reshape(counts)
        """(layers, granules): weights of stamps in an answer."""

    def chain(self, token_ids: Ints, before: Words, starts: Ints) -> Words:
        """Stamps of tokens (n,) of several requests: those of request i begin at starts[i] and follow the stamp
        before[i].
        """
        parts, offsets = self._tokens[token_ids], before * self._factor
        if len(starts) == len(token_ids):  # all decode
            return parts + offsets
        counts = np.diff(starts, append=len(token_ids))
        within = np.arange(len(token_ids)) - np.repeat(starts, counts)
        parts *= self._inverses[within]
        sums = np.cumsum(parts, dtype=np.uint64)
        stamps: Words = self._powers[within] * (sums + np.repeat(offsets - (sums[starts] - parts[starts]), counts))
        return stamps


def looked_at(granules: Ints, lengths: Ints) -> Ints:
    """In each granule, the position with the stamp that determines the answer after this many tokens; all positions
    have their turn.
    """
    first = granules * GRANULE
    positions: Ints = first + np.minimum((granules + lengths) % GRANULE, lengths - first - 1)
    return positions


def answers(folds: Words, lengths: Ints) -> list[int]:
    """The next tokens for weighted sums of stamps."""
    tokens = []
    for fold, length in zip(folds.tolist(), lengths.tolist(), strict=True):  # few: numpy's ways are longer
        word = (fold + length + _ANSWER) & _WORD
        word = (word ^ (word >> 30)) * _MIX & _WORD
        word = (word ^ (word >> 27)) * _MIX_AGAIN & _WORD
        tokens.append((word ^ (word >> 31)) % len(_ANSWERS) + _ANSWERS.start)
    return tokens


def expected(profile: Profile, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The first tokens of the answer to a prompt, on any engine of that profile with correct KV."""
    stamps = Stamps(profile)
    weights = stamps.weights.sum(axis=0, dtype=np.uint64)
    start = np.zeros(1, np.int64)
    chain = stamps.chain(np.array(prompt, np.int64), np.zeros(1, np.uint64), start)
    tokens: list[int] = []
    for length in range(len(prompt), len(prompt) + num_tokens):
        granules, lengths = np.arange(-(-length // GRANULE)), np.array([length])
        fold = (chain[looked_at(granules, lengths)] * weights[: len(granules)]).sum(dtype=np.uint64, keepdims=True)
        tokens += answers(fold, lengths)
        chain = np.append(chain, stamps.chain(np.array(tokens[-1:]), chain[-1:], start))
    return tokens
