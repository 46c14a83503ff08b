"""Questions that the embedded default model can answer: codes named in the prompt, asked for at its end.

A wrong answer shows at a glance that KV was lost. A right one proves less: that the asked fact's KV in layer 1 arrived.
Its KV in one other layer can be missing without changing the top token, so a full check compares logprobs with those
of a single engine. The text format lives here because the training script and the demo must agree on it to the byte.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Each is one token when a space precedes it (the training script checks that), so every fact has the same length.
# fmt: off
KEYS: tuple[str, ...] = (
    "ant", "arm", "art", "axe", "bag", "bat", "bay", "bead", "bean", "bear", "bed", "bee", "bell", "belt", "bird",
    "boat", "bolt", "bone", "book", "boot", "bowl", "box", "bug", "bus", "cake", "can", "cap", "car", "cart", "cat",
    "cave", "clay", "coal", "coat", "coin", "cone", "cook", "cork", "corn", "cow", "crab", "crow", "cup", "deer",
    "desk", "dish", "dog", "door", "dot", "drum", "duck", "dust", "ear", "egg", "eye", "fan", "farm", "fern", "fig",
    "fire", "fish", "flag", "fox", "frog", "gate", "gear", "goat", "gold", "hat", "hay", "hen", "hill", "horn",
    "ink", "iron", "jam", "jar", "key", "knee", "lake", "land", "lark", "lion", "lock", "log", "map", "mat", "mint",
    "moon", "mug", "nest", "net", "pan", "park", "path", "pea", "pear", "pen", "pig", "pin", "plum", "pot", "rain",
    "rat", "ring", "road", "rock", "rope", "sand", "snow", "sock", "star", "sun", "tea", "toad", "tool", "tree",
    "tub", "wave", "well", "wind", "wing",
)
# fmt: on
CODE_DIGITS = 4
MAX_FACTS = 96  # the longest prompt the model was trained on, about 680 tokens
TOKENS_PER_FACT = 7  # ` fox`, `=`, four digits, `,` or `.`
COMPLETION_OVERHEAD_TOKENS = 5  # BOS, `Codes`, `:` and the asked ` fox`, `=`
CHAT_OVERHEAD_TOKENS = 9  # BOS, user, `Codes`, `:`, ` What`, ` is`, ` fox`, `?`, assistant

Fact = tuple[str, str]  # key, code


@dataclass(frozen=True, slots=True)
class RecallQuestion:
    """One question in both forms; greedy decoding of either gives exactly `answer`, then the end-of-text token."""

    prompt: str  # for /v1/completions; BOS is added by the tokenizer
    answer: str
    messages: list[dict[str, str]]  # for /v1/chat/completions
    facts: tuple[Fact, ...]  # in prompt order, so that a caller can ask a follow-up with `ask_text`


def draw_facts(seed: int, num_facts: int) -> tuple[Fact, ...]:
    """`num_facts` distinct keys in random order, each with a random code of `CODE_DIGITS` digits.

    Raises ValueError unless 1 <= num_facts <= MAX_FACTS.
    """
    if not 1 <= num_facts <= MAX_FACTS:
        raise ValueError(f"num_facts must be in 1..{MAX_FACTS}, got {num_facts}")
    rng = random.Random(seed)
    return tuple((key, f"{rng.randrange(10**CODE_DIGITS):0{CODE_DIGITS}d}") for key in rng.sample(KEYS, num_facts))


def facts_text(facts: Sequence[Fact]) -> str:
    """`Codes: fox=4821, hat=0937.`: `TOKENS_PER_FACT` tokens per fact and two for the head."""
    return "Codes: " + ", ".join(f"{key}={code}" for key, code in facts) + "."


def ask_text(key: str) -> str:
    """The question of a chat turn, also of a follow-up turn that names no facts."""
    return f"What is {key}?"


def make_question(seed: int, num_facts: int) -> RecallQuestion:
    """A recall question, a pure function of its arguments; the answer is the code of one of the facts.

    Prompt length: 7 * num_facts + 5 tokens as a completion, 7 * num_facts + 9 as a chat (see `num_prompt_tokens`).
    The answer is `CODE_DIGITS` tokens and the end-of-text token.
    """
    facts = draw_facts(seed, num_facts)
    key, code = random.Random(f"ask {seed}").choice(facts)
    text = facts_text(facts)
    return RecallQuestion(
        prompt=f"{text} {key}=",
        answer=code,
        messages=[{"role": "user", "content": f"{text} {ask_text(key)}"}],
        facts=facts,
    )


def make_recital(seed: int, num_facts: int) -> RecallQuestion:
    """A question whose answer repeats all facts: 7 * num_facts + 3 tokens, each read from its own place in the KV.

    For runs that need a long answer: migration in mid-stream, preemption, stop strings.
    """
    facts = draw_facts(seed, num_facts)
    text = facts_text(facts)
    return RecallQuestion(
        prompt=f"{text} Repeat.\n", answer=text, messages=[{"role": "user", "content": f"{text} Repeat."}], facts=facts
    )


def num_prompt_tokens(num_facts: int, *, chat: bool = False) -> int:
    """Tokens of `make_question`'s prompt, BOS and chat markers included."""
    return TOKENS_PER_FACT * num_facts + (CHAT_OVERHEAD_TOKENS if chat else COMPLETION_OVERHEAD_TOKENS)
