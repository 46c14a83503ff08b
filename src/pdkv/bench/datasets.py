"""Data for a load: synthetic prompts of given lengths, and the file formats that the field publishes."""

import csv
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from pdkv.base.limits import MAX_TOTAL_PROMPT_TOKENS
from pdkv.bench.trace import Trace, TraceRequest, prompts, read_trace
from pdkv.bench.workload import FIRST_ID, LAST_ID, Prompt, Session, Turn, one_turn, units
from pdkv.errors import ConfigError

DEFAULT_OUTPUT_LEN = 128

MOONCAKE_BLOCK = 512
"""Tokens per block of a Mooncake trace."""

_WORDS = (
    "time", "year", "way", "day", "man", "life", "world", "school", "group", "hand", "part", "place", "work", "point",
    "home", "room",
)  # fmt: skip


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of synthetic data. Lengths are in tokens, or in words where prompts are texts."""

    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 0  # of each answer; 0: the data set's own, else DEFAULT_OUTPUT_LEN
    range_ratio: float = 0.0  # lengths lie within this share of the given ones, drawn evenly
    prefix_len: int = 0  # of a prefix that comes before the input
    num_prefixes: int = 1
    turns: int = 5
    pause_s: float = 0.0
    max_context: int = 0  # to which an agent's session grows; 0: AGENT_CONTEXT
    vocabulary: int = LAST_ID


class Maker:
    """Makes random prompts as token ids or, for servers that take texts alone, of words of one token each."""

    def __init__(self, seed: int | str, *, as_text: bool, vocabulary: int = LAST_ID) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.as_text = as_text
        self._units: Sequence[Any] = _WORDS if as_text else tuple(range(FIRST_ID, max(vocabulary, FIRST_ID + 1)))

    def units(self, length: int, rng: random.Random | None = None) -> list[Any]:
        """That many token ids or words. Raises ConfigError for more than a request can have."""
        if length > MAX_TOTAL_PROMPT_TOKENS:
            raise ConfigError(f"prompts of at most {MAX_TOTAL_PROMPT_TOKENS} tokens were expected, got one of {length}")
        return (rng or self.rng).choices(self._units, k=length)

    def as_prompt(self, units: list[Any]) -> Prompt:
        """A prompt of these token ids or words."""
        return " ".join(units) if self.as_text else units

    def prompt(self, length: int) -> Prompt:
        """A prompt of that many tokens or words."""
        return self.as_prompt(self.units(length))

    def joined(self, *parts: Prompt) -> Prompt:
        """Prompts one behind the other."""
        return self.as_prompt([unit for part in parts for unit in units(part)])

    def around(self, length: int, ratio: float) -> int:
        """A length within `ratio` of the given one, at least 1."""
        return max(1, self.rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))

    def pause_s(self, mean_s: float) -> float:
        """Seconds of a pause, exponentially distributed; 0 if its mean is."""
        return self.rng.expovariate(1 / mean_s) if mean_s else 0.0


def random_requests(shape: Shape, make: Maker) -> Iterator[Session]:
    """Requests of random prompts, behind one of `num_prefixes` prefixes."""
    output_len = shape.output_len or DEFAULT_OUTPUT_LEN
    prefixes = [make.prompt(shape.prefix_len) for _ in range(shape.num_prefixes)]
    for _ in range(shape.num_prompts):
        own = make.prompt(make.around(shape.input_len, shape.range_ratio))
        yield one_turn(make.joined(make.rng.choice(prefixes), own), make.around(output_len, shape.range_ratio))


def conversations(shape: Shape, make: Maker) -> Iterator[Session]:
    """Sessions of `turns` turns; `num_prompts` counts the turns of all of them."""
    output_len = shape.output_len or DEFAULT_OUTPUT_LEN
    prefixes = [make.prompt(shape.prefix_len) for _ in range(shape.num_prefixes)]
    for _ in range(-(-shape.num_prompts // shape.turns)):
        first = make.joined(make.rng.choice(prefixes), make.prompt(make.around(shape.input_len, shape.range_ratio)))
        turns = [Turn(first, make.around(output_len, shape.range_ratio))]
        for _ in range(shape.turns - 1):
            more = make.prompt(make.around(shape.input_len, shape.range_ratio))
            turns.append(Turn(more, make.around(output_len, shape.range_ratio), make.pause_s(shape.pause_s)))
        yield Session(tuple(turns))


AGENT_TURNS, AGENT_CONTEXT = 33, 16_384
AGENT_RATIO = 131
"""Prompt tokens per answer token, over all turns of a session: the median of 610 traces of coding agents."""


def agents(shape: Shape, make: Maker) -> Iterator[Session]:
    """Sessions of coding agents: 33 turns, a context that grows to `max_context`, 131 prompt tokens per answer token.

    Each turn adds as many tokens as the system prompt has; over a session 94 % of the prompt tokens were there before.
    """
    context = shape.max_context or AGENT_CONTEXT
    step = max(context // (AGENT_TURNS + 1), 2)
    mean_steps = (AGENT_TURNS + 3) / 2  # of a prompt
    answer = shape.output_len or max(round(step * mean_steps / AGENT_RATIO), 1)
    system = make.prompt(step)
    for _ in range(-(-shape.num_prompts // AGENT_TURNS)):
        turns = [Turn(make.joined(system, make.prompt(step)), answer)]
        for _ in range(AGENT_TURNS - 1):
            turns.append(Turn(make.prompt(max(step - answer, 1)), answer, make.pause_s(shape.pause_s)))
        yield Session(tuple(turns))


# --- files ----------------------------------------------------------------------------------------------------------


def sharegpt(path: Path, shape: Shape, make: Maker) -> Iterator[Session]:
    """The first turn of each conversation of a ShareGPT file; answers have the lengths that the file's have."""
    for number, entry in enumerate(_json_list(path)):
        turns = _field(entry, "conversations", f"{path}: conversation {number}")
        if len(turns) < 2:
            continue
        prompt, answer = (str(_field(turn, "value", f"{path}: conversation {number}")) for turn in turns[:2])
        if prompt and answer:
            yield one_turn(prompt, shape.output_len or approximate_tokens(answer))


def burstgpt(path: Path, shape: Shape, make: Maker) -> Iterator[Session]:
    """Lengths and times of a BurstGPT file; the prompts are random. Requests without an answer are left out."""
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                at_s, prompt = float(row["Timestamp"]), int(row["Request tokens"])
                answer = int(row["Response tokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}: line {number}: Timestamp, Request tokens and Response tokens were expected: {error!r}"
                ) from None
            if answer > 0 and prompt > 0:
                yield one_turn(make.prompt(prompt), shape.output_len or answer, at_s)


def mooncake(path: Path, shape: Shape, make: Maker) -> Iterator[Session]:
    """A Mooncake trace: equal hash ids are equal blocks of 512 tokens."""
    for where, row in _json_lines(path):
        length, hashes = int(_field(row, "input_length", where)), _field(row, "hash_ids", where)
        blocks = [make.units(MOONCAKE_BLOCK, random.Random(f"{make.seed}/{number}")) for number in hashes]
        own = [unit for block in blocks for unit in block][:length]
        prompt = make.as_prompt(own + make.units(length - len(own)))
        num_out = shape.output_len or max(int(_field(row, "output_length", where)), 1)
        yield one_turn(prompt, num_out, float(row.get("timestamp", 0)) / 1000)


def custom(path: Path, shape: Shape, make: Maker) -> Iterator[Session]:
    """Lines of JSON with "prompt" (text or token ids) and, if they have one, "output_tokens" and "timestamp" (ms)."""
    for where, row in _json_lines(path):
        prompt = _field(row, "prompt", where)
        is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise ConfigError(f"{where}: prompt: a text or a list of token ids was expected, got {str(prompt)[:80]!r}")
        if is_ids and make.as_text:
            raise ConfigError(f"{where}: prompt: a text was expected for --endpoint chat, got token ids")
        at_s = float(row["timestamp"]) / 1000 if "timestamp" in row else None
        yield one_turn(prompt, shape.output_len or int(row.get("output_tokens", DEFAULT_OUTPUT_LEN)), at_s)


def recorded(path: Path, shape: Shape, make: Maker) -> Iterator[Session]:
    """A router's recording: equal blocks have equal tokens. A prompt that goes on from the one before it in its session
    waits for that one's answer, as it did, and all others begin at their own times.
    """
    return iter(recorded_sessions(read_trace(path), shape, make))


def recorded_sessions(trace: Trace, shape: Shape, make: Maker) -> list[Session]:
    """The sessions of a recording that was read; requests that were refused before they were read are not in them."""
    talks: list[list[Turn]] = []
    begins: list[float] = []
    latest: dict[int, tuple[TraceRequest, list[Turn]]] = {}  # by session
    vocabulary = FIRST_ID + len(_WORDS) if make.as_text else shape.vocabulary
    for request, ids in islice(zip(trace.requests, prompts(trace, vocabulary), strict=True), shape.num_prompts):
        if not ids:
            continue
        prompt = make.as_prompt([_WORDS[token - FIRST_ID] for token in ids] if make.as_text else ids)
        num_out = shape.output_len or request.output_tokens or request.max_tokens or DEFAULT_OUTPUT_LEN
        before, turns = latest.get(request.session, (None, []))
        pause_s = 0.0
        if before is not None and request.follows(before):
            pause_s = request.t - before.t - before.e2e_s
        else:
            turns = []
            talks.append(turns)
            begins.append(request.t)
        turns.append(Turn(prompt, num_out, pause_s, is_whole=True, priority=request.priority))
        latest[request.session] = request, turns
    return [Session(turns, at_s) for turns, at_s in zip(talks, begins, strict=True)]


SYNTHETIC: Mapping[str, Callable[[Shape, Maker], Iterator[Session]]] = {
    "random": random_requests,
    "conversations": conversations,
    "agents": agents,
}
FILES: Mapping[str, Callable[[Path, Shape, Maker], Iterator[Session]]] = {
    "sharegpt": sharegpt,
    "burstgpt": burstgpt,
    "mooncake": mooncake,
    "custom": custom,
    "trace": recorded,
}


def load(name: str, path: Path | None, shape: Shape, make: Maker) -> Sequence[Session]:
    """The sessions of a data set, by its name.

    Raises:
        ConfigError: there is no such data set or file, or the file is not in that format.
    """
    if name in SYNTHETIC:
        return list(_first_turns(SYNTHETIC[name](shape, make), shape.num_prompts))
    if path is None:
        raise ConfigError(f"--dataset-name {name}: a file was expected in --dataset-path")
    try:
        found = list(islice(FILES[name](path, shape, make), shape.num_prompts))
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from error
    except (csv.Error, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"--dataset-path {path}: not in the format {name}: {error}") from None
    if not found:
        raise ConfigError(f"--dataset-path {path}: no request was found in it")
    if not all(isfinite(session.at_s or 0.0) for session in found):
        raise ConfigError(f"--dataset-path {path}: finite times were expected")
    return sorted(found, key=lambda session: session.at_s or 0.0)


def _first_turns(sessions: Iterator[Session], num: int) -> Iterator[Session]:
    """Sessions of `num` turns together: the last one may be cut."""
    while num > 0:
        session = next(sessions)
        yield session if len(session.turns) <= num else Session(session.turns[:num])
        num -= len(session.turns)


def approximate_tokens(text: str) -> int:
    """The number of tokens that a text has, if a tokenizer makes four of three words."""
    return max(1, round(len(text.split()) * 4 / 3))


def _json_list(path: Path) -> list[Any]:
    document = json.loads(path.read_text())
    if not isinstance(document, list):
        raise ConfigError(f"--dataset-path {path}: a JSON list was expected, got {type(document).__name__}")
    return document


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}: line {number}: a JSON object was expected, got {line[:80]!r}")
                yield f"{path}: line {number}", row


def _field(row: Any, name: str, where: str) -> Any:
    if not isinstance(row, dict) or name not in row:
        raise ConfigError(f"{where}: the field {name!r} was expected")
    return row[name]
