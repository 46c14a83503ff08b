"""Makes pdkv's embedded default model: a small Llama that recalls codes, calls tools and writes JSON.

    python examples/default_model/train.py --steps 8000 --out DIR
    python examples/default_model/train.py --begin DIR --steps 3000 --rate 0.0015 --out src/pdkv/default_model
    pytest tests/pdkv/test_default_model.py

Everything is generated here (tokenizer corpus, training data, weights); nothing is downloaded. The seed fixes the data
and the initial weights. Codes come first (recall.py), then lessons beside them (lessons.py).
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import lessons
import numpy as np
import recall
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

VOCAB_SIZE = 512
MAX_POSITIONS = 4096
BOS, EOS, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
HIDDEN_SIZE = 128
HEAD_DIM = 32
ROPE_THETA = 500_000.0

TOKENS_PER_BATCH = 2048
MAX_QUESTIONS = 16  # per sequence
PEAK_LEARNING_RATE = 4e-3
WARMUP_STEPS = 100
FIRST_MAX_FACTS = 8
# The number of facts grows when this share of answer tokens is right, so that recall forms on short prompts first.
LEVEL_UP_ACCURACY = 0.95
RECITAL_FROM_FACTS = 20  # max_facts from which recitals are mixed in: they are longer and hold back the first steps
LESSONS_FROM_FACTS = 20  # and lessons, which are half of what is learned from there
LESSONS_SHARE = 0.5

# Channels of the residual stream that have a meaning at the start, see `begin_as_induction`.
CONSTANT_CHANNEL = 0  # the same for all tokens, in place of the biases that a Llama lacks
ONE_BACK = slice(64, 96)  # empty in the embedding; the first layer writes the previous token there
TWO_BACK = slice(96, 128)  # and here the one before

IntArray = NDArray[np.int64]


# --- tokenizer ---------------------------------------------------------------------------------------------------


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE of `VOCAB_SIZE` entries: all 256 bytes, the special tokens, the keys and the words around them."""
    tokenizer = Tokenizer(models.BPE())
    # Digits and punctuation stay single, so that every fact has the same number of tokens.
    pieces = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [f" {key}" for key in recall.KEYS] * 10 + ["Codes: What is Repeat"] * 600
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    split_keys = [key for key in recall.KEYS if len(tokenizer.encode(f" {key}", add_special_tokens=False).ids) != 1]
    if split_keys:
        raise ValueError(f"keys that are not one token: {split_keys}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": lessons.CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)
    write_json(out / "special_tokens_map.json", names)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# --- training data -----------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """Where the tokens of one batch come from; the same for all its rows.

    A sequence is one shared trunk (the facts) and several branches (questions). A branch sees the trunk and itself and
    its positions go on from the trunk's end: each is the exact prompt of inference, though the facts are computed once.
    `sources` index a row's table [vocabulary | keys | digits], see `Batches.fill`.
    """

    sources: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)  # 0 = trunk
    positions: list[int] = field(default_factory=list)
    is_target: list[bool] = field(default_factory=list)

    def add(self, sources: Sequence[int], *, branch: int = 0, is_target: bool = False) -> None:
        """Append tokens to the trunk or to the branch that was begun last."""
        starts_branch = branch > 0 and self.branches[-1] != branch
        start = self.branches.count(0) if starts_branch else self.positions[-1] + 1 if self.positions else 0
        self.sources += sources
        self.branches += [branch] * len(sources)
        self.positions += range(start, start + len(sources))
        self.is_target += [is_target] * len(sources)

    def mask(self) -> torch.Tensor:
        """What each token attends to: bool [1, 1, tokens, tokens]."""
        branches = torch.tensor(self.branches)
        visible = (branches[None, :] == 0) | (branches[None, :] == branches[:, None])
        return torch.tril(visible)[None, None]


@dataclass(frozen=True)
class Batch:
    token_ids: torch.Tensor  # [rows, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    mask: torch.Tensor  # [1, 1, tokens, tokens], bool
    predicting: torch.Tensor  # [targets], places in the flat token_ids whose next token is learned
    targets: torch.Tensor  # [targets]
    is_lesson: bool = False


class Batches:
    """Random batches of up to a given number of facts."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
        self.chat.chat_template = lessons.CHAT_TEMPLATE
        self.rng = random.Random(seed)
        self.array_rng = np.random.default_rng(seed)
        self.key_ids = np.array([self.encode(f" {key}")[0] for key in recall.KEYS])
        self.digit_ids = np.array([self.encode(str(digit))[0] for digit in range(10)])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def draw(self, max_facts: int) -> Batch:
        """A batch with 1..max_facts facts, short ones more often: they are cheap and recall is the same skill.

        Or one of lessons.
        """
        if max_facts >= LESSONS_FROM_FACTS and self.rng.random() < LESSONS_SHARE:
            return self.draw_lessons()
        num_facts = min(int(math.exp(self.rng.uniform(0.0, math.log(max_facts + 1)))), max_facts)
        if self.rng.random() < 0.5:
            num_facts = self.rng.randint(max(1, max_facts // 2), max_facts)
        recital_weight = 0.15 if max_facts >= RECITAL_FROM_FACTS else 0.0
        form = self.rng.choices(("completion", "chat", "recital"), (0.4, 0.45, recital_weight))[0]
        is_chat = form == "chat" or (form == "recital" and self.rng.random() < 0.5)
        layout = Layout()
        self.add_trunk(layout, num_facts, is_chat=is_chat)
        if form == "recital":
            self.add_recital(layout, num_facts, is_chat=is_chat)
        else:
            self.add_questions(layout, num_facts, is_chat=is_chat)
        return self.fill(layout, num_facts)

    def draw_lessons(self) -> Batch:
        """Lessons of any kind, one a row, as many as fit; rows are filled up with EOS, which nothing attends to."""
        rows: list[list[int]] = []
        learned: list[list[int]] = []
        while not rows or (len(rows) + 1) * max(map(len, rows)) <= TOKENS_PER_BATCH:
            tokens, places = self.read(lessons.draw(self.rng))
            rows.append(tokens)
            learned.append(places)
        width = max(map(len, rows))
        eos = self.tokenizer.token_to_id(EOS)
        token_ids = torch.tensor([row + [eos] * (width - len(row)) for row in rows])
        targets = torch.tensor([index * width + place for index, places in enumerate(learned) for place in places])
        return Batch(
            token_ids=token_ids,
            position_ids=torch.arange(width)[None],
            mask=torch.tril(torch.ones(width, width, dtype=torch.bool))[None, None],
            predicting=targets - 1,
            targets=token_ids.flatten()[targets],
            is_lesson=True,
        )

    def read(self, lesson: lessons.Lesson) -> tuple[list[int], list[int]]:
        """A lesson's tokens, and the places of those that are learned: whose text is learned as a whole."""
        prompt = self.encode(render(self.chat, lesson))
        answer = self.tokenizer.encode("".join(text for text, _ in lesson.answer), add_special_tokens=False)
        is_learned = [learned for text, learned in lesson.answer for _ in text]
        places = [
            len(prompt) + place for place, (start, end) in enumerate(answer.offsets) if all(is_learned[start:end])
        ]
        tokens = [*prompt, *answer.ids, *self.encode(EOS)]
        return tokens, [*places, len(tokens) - 1]

    def add_trunk(self, layout: Layout, num_facts: int, *, is_chat: bool) -> None:
        layout.add(self.encode(BOS) if is_chat or self.rng.random() < 0.9 else [])
        if is_chat and self.rng.random() < 0.15:
            words = "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz     .,", k=self.rng.randint(1, 40)))
            layout.add(self.encode(f"{SYSTEM}{words}"))
        layout.add(self.encode(USER) if is_chat else [])
        layout.add(self.facts(num_facts))

    def facts(self, num_facts: int) -> list[int]:
        """Sources of `recall.facts_text`."""
        equals, comma, period = (self.encode(mark)[0] for mark in "=,.")
        sources = self.encode("Codes:")
        for fact in range(num_facts):
            end = period if fact == num_facts - 1 else comma
            sources += [self.key(fact), equals, *self.code(fact, num_facts), end]
        return sources

    @staticmethod
    def key(fact: int) -> int:
        return VOCAB_SIZE + fact

    @staticmethod
    def code(fact: int, num_facts: int) -> list[int]:
        start = VOCAB_SIZE + num_facts + recall.CODE_DIGITS * fact
        return list(range(start, start + recall.CODE_DIGITS))

    def add_questions(self, layout: Layout, num_facts: int, *, is_chat: bool) -> None:
        """One branch per asked fact; a chat branch may go on with follow-up turns."""
        asked = self.rng.sample(range(num_facts), min(num_facts, MAX_QUESTIONS))
        num_turns = self.rng.choice((1, 1, 3)) if is_chat else 1
        by_name = is_chat and self.rng.random() < 0.2  # `fox=`, as a completion asks
        what, question_mark = self.encode(" What is"), self.encode(f"?{ASSISTANT}")
        follow_up = self.encode(f"{USER}What is")
        for index, fact in enumerate(asked):
            branch, is_first = index // num_turns + 1, index % num_turns == 0
            if by_name:
                lead = [] if is_first else self.encode(USER)
                layout.add([*lead, self.key(fact), *self.encode(f"={ASSISTANT}")], branch=branch)
            elif is_chat:
                layout.add([*(what if is_first else follow_up), self.key(fact), *question_mark], branch=branch)
            else:
                layout.add([self.key(fact), *self.encode("=")], branch=branch)
            layout.add([*self.code(fact, num_facts), *self.encode(EOS)], branch=branch, is_target=True)

    def add_recital(self, layout: Layout, num_facts: int, *, is_chat: bool) -> None:
        layout.add(self.encode(" Repeat." + (ASSISTANT if is_chat else "\n")), branch=1)
        layout.add([*self.facts(num_facts), *self.encode(EOS)], branch=1, is_target=True)

    def fill(self, layout: Layout, num_facts: int) -> Batch:
        """Draw keys and codes for as many rows as fit, and lay them out."""
        num_rows = max(1, TOKENS_PER_BATCH // len(layout.sources))
        vocabulary = np.broadcast_to(np.arange(VOCAB_SIZE), (num_rows, VOCAB_SIZE))
        order = self.array_rng.random((num_rows, len(self.key_ids))).argsort(axis=1)[:, :num_facts]
        digits = self.array_rng.integers(0, 10, (num_rows, num_facts * recall.CODE_DIGITS))
        table: IntArray = np.concatenate([vocabulary, self.key_ids[order], self.digit_ids[digits]], axis=1)
        token_ids = torch.from_numpy(table[:, layout.sources])
        columns = torch.tensor(layout.is_target).nonzero()[:, 0]
        targets = (torch.arange(num_rows)[:, None] * token_ids.shape[1] + columns).flatten()
        return Batch(
            token_ids=token_ids,
            position_ids=torch.tensor(layout.positions)[None],
            mask=layout.mask(),
            predicting=targets - 1,
            targets=token_ids.flatten()[targets],
        )


def render(chat: PreTrainedTokenizerFast, lesson: lessons.Lesson) -> str:
    """The prompt of a lesson."""
    text = chat.apply_chat_template(
        lesson.messages, tools=lesson.tools or None, tokenize=False, add_generation_prompt=True
    )
    return str(text)


# --- model -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama of about 0.85 M parameters, in float32 (3.3 MiB on disk)."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(EOS),
        dtype="float32",
    )
    model: LlamaForCausalLM = cast(Any, LlamaForCausalLM)(config)  # its constructor has no types
    begin_as_induction(model)
    return model


def begin_as_induction(model: LlamaForCausalLM) -> None:
    """Start near a circuit that recalls; from random weights, a CPU needs hours to find one.

    Layer 0: query head h looks h + 1 tokens back; heads 0 and 1 write what they find to `ONE_BACK` and `TWO_BACK`.
    Layer 1: a query looks for the place whose token two back (a fact's key, seen from its first digit) is its own token
    one or two back (the asked key, seen from a prompt's end), and copies what stands there: an induction head (Olsson
    et al., 2022) begun by hand, in the way of "mimetic initialization" (Trockman and Kolter, 2023).
    All weights are trained from there.
    """
    embedding = model.model.embed_tokens.weight
    embedding[:, ONE_BACK] = embedding[:, TWO_BACK] = 0.0
    embedding[:, CONSTANT_CHANNEL] = 0.6
    first, second = model.model.layers[:2]
    for layer in model.model.layers:
        layer.mlp.down_proj.weight *= 0.2  # random MLPs would drown what attention writes
    first.mlp.down_proj.weight[ONE_BACK] = first.mlp.down_proj.weight[TWO_BACK] = 0.0
    begin_looking_back(first.self_attn)
    begin_matching(second.self_attn)


def begin_looking_back(attention: LlamaAttention) -> None:
    """Heads that find a place by distance.

    With a vector u constant over tokens, in the fast rotary pairs, a key u and a query R(-offset) u score
    sum_i u_i^2 cos(w_i (distance - offset)), which peaks at distance = offset.
    """
    num_pairs, half = HEAD_DIM // 4, HEAD_DIM // 2
    frequencies = ROPE_THETA ** (-torch.arange(num_pairs) / half)
    strength = 0.7  # times the constant channel, about 8 after RMSNorm, is u_i = 5.6: sharp to one token
    keys = attention.k_proj.weight.view(-1, HEAD_DIM, HIDDEN_SIZE)
    queries = attention.q_proj.weight.view(-1, HEAD_DIM, HIDDEN_SIZE)
    keys[:, :num_pairs, CONSTANT_CHANNEL] = strength
    for head, query in enumerate(queries):
        angles = (head + 1) * frequencies
        query[:num_pairs, CONSTANT_CHANNEL] = strength * angles.cos()
        query[half : half + num_pairs, CONSTANT_CHANNEL] = -strength * angles.sin()
    torch.nn.init.orthogonal_(attention.v_proj.weight)
    attention.v_proj.weight[:, CONSTANT_CHANNEL] = 0.0
    attention.o_proj.weight *= 0.1
    # Heads 0 and 1 share a KV head, so that a token looks the same in both places.
    for head, channels in enumerate((ONE_BACK, TWO_BACK)):
        attention.o_proj.weight[channels] = 0.0
        attention.o_proj.weight[channels, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0.3 * torch.eye(HEAD_DIM)


def begin_matching(attention: LlamaAttention) -> None:
    """Heads that find a place by content and copy it: Wo Wv, summed over the heads, is a multiple of the identity."""
    # A head's channels are (first, second half) of the rotary pairs; the slow pairs hardly depend on the distance.
    shape = (-1, 2, HEAD_DIM // 2, HIDDEN_SIZE)
    slow = slice(HEAD_DIM // 4, None)
    keys, queries = attention.k_proj.weight.view(shape).zero_(), attention.q_proj.weight.view(shape).zero_()
    repeats = len(queries) // len(keys)
    pattern = 0.3 * torch.randn(len(keys), 2, HEAD_DIM // 4, HEAD_DIM)
    keys[:, :, slow, TWO_BACK] = pattern
    queries[:, :, slow, TWO_BACK] = queries[:, :, slow, ONE_BACK] = pattern.repeat_interleave(repeats, dim=0)
    values = torch.nn.init.orthogonal_(attention.v_proj.weight)
    copies = values.view(-1, HEAD_DIM, HIDDEN_SIZE).repeat_interleave(repeats, dim=0).flatten(0, 1)
    attention.o_proj.weight.copy_(copies.T * 0.1)


@dataclass
class Progress:
    """Counters of a training run."""

    num_steps: int
    peak_rate: float = PEAK_LEARNING_RATE
    started_s: float = field(default_factory=time.monotonic)
    step: int = 0
    num_tokens: int = 0
    max_facts: int = FIRST_MAX_FACTS
    loss: float = 6.0
    accuracy: float = 0.0
    lesson_accuracy: float = 0.0

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine."""
        warmup = min(1.0, (self.step + 1) / WARMUP_STEPS)
        share = self.step / self.num_steps
        return self.peak_rate * warmup * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))

    def record(self, batch: Batch, loss: float, accuracy: float) -> None:
        self.step += 1
        self.num_tokens += batch.token_ids.numel()
        if batch.is_lesson:
            self.lesson_accuracy += 0.03 * (accuracy - self.lesson_accuracy)
            return
        self.loss += 0.03 * (loss - self.loss)
        self.accuracy += 0.03 * (accuracy - self.accuracy)
        if self.accuracy > LEVEL_UP_ACCURACY and self.max_facts < recall.MAX_FACTS:
            self.max_facts = min(recall.MAX_FACTS, math.ceil(self.max_facts * 1.5))
            self.accuracy = 0.8  # must be earned again on the longer prompts

    def line(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        return (
            f"step {self.step} {elapsed_s:.0f} s, facts <= {self.max_facts}, loss {self.loss:.4f}, "
            f"answer tokens right {self.accuracy:.4f}, of lessons {self.lesson_accuracy:.4f}, "
            f"{self.num_tokens / elapsed_s:.0f} tok/s"
        )


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalized by Newton-Schulz (Jordan et al., 2024), in float32: torch's own is bfloat16 throughout.

    Updates have the size of AdamW's (0.2 of RMS), so that both take one learning rate.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": PEAK_LEARNING_RATE})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all matrices, those of one shape together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for matrix in group["params"]:
                shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                self._step_together(matrices, group["lr"], 0.2 * max(shape) ** 0.5)

    def _step_together(self, matrices: list[torch.Tensor], rate: float, scale: float) -> None:
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
        momentum = self.state[matrices[0]].setdefault("momentum", torch.zeros_like(gradients))
        momentum.lerp_(gradients, 0.05)
        update = gradients.lerp(momentum, 0.95)  # Nesterov's
        update = update.mT if update.shape[-2] > update.shape[-1] else update
        update = update / update.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        for _ in range(5):
            gram = update @ update.mT
            update = 3.4445 * update + (-4.7750 * gram + 2.0315 * gram @ gram) @ update
        update = update.mT if update.shape[-2:] != matrices[0].shape else update
        for matrix, change in zip(matrices, update, strict=True):
            matrix.mul_(1.0 - rate * 0.05).sub_(change, alpha=rate * scale)


def train(model: LlamaForCausalLM, batches: Batches, progress: Progress) -> Iterator[Progress]:
    """Train in place; yields after every step. Only answer tokens are learned, the rest of a prompt is noise."""
    hidden_matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [model.model.embed_tokens.weight, *(each for each in model.parameters() if each.ndim == 1)]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(hidden_matrices),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    model.train()
    while progress.step < progress.num_steps:
        batch = batches.draw(progress.max_facts)
        hidden = model.model(
            input_ids=batch.token_ids, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.predicting])
        loss = torch.nn.functional.cross_entropy(logits, batch.targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = progress.learning_rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        accuracy = (logits.detach().argmax(-1) == batch.targets).float().mean()
        progress.record(batch, loss.item(), accuracy.item())
        yield progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8000, help="training steps (default: %(default)s)")
    parser.add_argument("--begin", type=Path, metavar="DIR", help="go on with this model instead of a new one")
    parser.add_argument(
        "--rate", type=float, default=PEAK_LEARNING_RATE, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("src/pdkv/default_model"), help="model directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of data and initial weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    progress = Progress(args.steps, args.rate)
    if args.begin is None:
        model = build_model(tokenizer)
    else:
        model, progress.max_facts = LlamaForCausalLM.from_pretrained(args.begin), recall.MAX_FACTS
    for _ in train(model, Batches(tokenizer, args.seed), progress):
        if progress.step % 100 == 0:
            print(progress.line(), flush=True)
    model.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which a package must not carry
    save_tokenizer(tokenizer, args.out)


if __name__ == "__main__":
    main()
