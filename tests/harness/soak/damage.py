"""A fuzzer of KV between save and load: values in each kind of store, and what travels between two engines.

python -m soak.damage --mutations 10000 --trials 1000: so many values of stores, over all kinds, and so many transfers
of each kind of damage, on each way and between engines of equal and unequal ranks (flights.py). Exit code 1 if a token
or a byte was wrong, or a damaged value that was read was not counted. The same seed draws the same damage.
"""

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from damage_subjects import KINDS, Subject, subject_of
from flights import DAMAGES, WAYS
from safetensors.torch import load_file, save_file
from small_models import make_hf_model

from pdkv.testing.engine import InProcessEngine
from soak.flown import finished, fly_all, save

PROMPTS = 4  # of a round, together in one batch
MAX_READS = 12  # of one round's prompts, until nothing damaged is left


class DamageReport(msgspec.Struct):
    """What one kind of store has seen."""

    kind: str
    applied: Counter[str] = msgspec.field(default_factory=Counter)  # mutations of values
    read: Counter[str] = msgspec.field(default_factory=Counter)  # those whose value an engine has read
    num_sound: int = 0  # sound values that were read
    num_counted: int = 0  # damaged values that the engines have reported
    num_rounds: int = 0
    num_prompts: int = 0  # answered from damaged stores, replays included
    violations: list[str] = []
    seconds: float = 0.0

    @property
    def num_read(self) -> int:
        """Damaged values that an engine has read."""
        return self.read.total()

    def __str__(self) -> str:
        verdict = f"{len(self.violations)} VIOLATIONS: {self.violations[:3]}" if self.violations else "no wrong token"
        return (
            f"{self.kind}: {self.applied.total()} values damaged in {len(self.applied)} ways; {self.num_read} "
            f"read, {self.num_counted} counted, and {self.num_sound} sound ones read; {self.num_prompts} prompts, "
            f"{verdict} ({self.seconds:.0f} s)"
        )


def foreign_model(model: Path, directory: Path) -> Path:
    """The same configuration with other weights."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    weights = {name: w * 1.5 if name.endswith("v_proj.weight") else w for name, w in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Fuzzer:
    """Engines over one subject: a writer, two readers, and others whose values are foreign to them."""

    def __init__(self, kind: str, subject: Subject, model: Path, foreign: Path, seed: int, stack: ExitStack) -> None:
        self.report = DamageReport(kind)
        self._subject = subject
        self._rng = random.Random(f"{seed} {kind}")
        self._writer, self._reader, self._other_reader, *others = (
            self._make(name, path, stack)
            for name, path in (
                ("writer", model),
                ("reader", model),
                ("other-reader", model),
                ("foreign-model", foreign),
                ("foreign-layout", model),
            )
        )
        self._foreign: dict[str, list[bytes]] = {}
        prompts = [self._prompt() for _ in range(PROMPTS)]
        for engine in others:
            engine.generate(prompts)
            self._foreign[engine.core.card.engine] = list(subject.take_saved(engine.core.card.engine).values())

    def _make(self, name: str, model: Path, stack: ExitStack) -> InProcessEngine:
        engine = InProcessEngine.of_model(model, self._subject.connector, self._subject.options(name), name=name)
        stack.callback(engine.close)
        return engine

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(2, 384) for _ in range(self._rng.randrange(200, 520))]

    def round(self, most: int) -> None:
        """Save new prompts, damage at most so many of their values, and read them until no damaged one is left."""
        prompts = [self._prompt() for _ in range(PROMPTS)]
        expected = self._writer.generate(prompts)
        values = self._subject.take_saved("writer")
        damaged = self._damage(values, most)
        self.report.num_rounds += 1
        readers = [self._reader, self._other_reader]
        left = [damaged, dict(damaged) if self._subject.stays_damaged else damaged]
        for turn in range(MAX_READS):
            self._read(readers[turn % 2], prompts, expected, left[turn % 2])
            if turn % 2 and not any(left):
                break

    def _damage(self, values: dict[bytes, bytes], most: int) -> dict[bytes, str]:
        """Damage some of the values; returns how, by name."""
        names = [name for name in values if self._rng.random() < self._subject.damaged_share][:most]
        damaged: dict[bytes, str] = {}
        while names:
            name = names.pop()
            mutation = self._rng.choice([*self._subject.mutations, "swap", *self._foreign])
            if mutation == "swap" and names:
                other = names.pop()
                self._subject.replace(name, values[other], self._rng)
                self._subject.replace(other, values[name], self._rng)
                damaged[other] = mutation
            elif mutation in self._foreign:
                self._subject.replace(name, self._rng.choice(self._foreign[mutation]), self._rng)
            elif mutation == "swap" or not self._subject.damage(name, values[name], mutation, self._rng):
                continue
            damaged[name] = mutation
        self.report.applied.update(damaged.values())
        return damaged

    def _read(
        self, engine: InProcessEngine, prompts: list[list[int]], expected: list[list[int]], damaged: dict[bytes, str]
    ) -> None:
        """Run the prompts, twice: what is corrupt hits the next request too. What was read is damaged no more."""
        before = engine.core.external.num_damaged
        for _ in range(2):
            outputs = engine.generate(prompts)
            self.report.num_prompts += len(prompts)
            wrong = sum(tokens != right for tokens, right in zip(outputs, expected, strict=True))
            if wrong:
                self._violation(f"{wrong} of {len(prompts)} wrong in {engine.core.card.engine}", damaged)
        asked = self._subject.take_read(engine.core.card.engine)
        read = asked & damaged.keys()
        self.report.num_sound += len(asked - read)
        num_counted = engine.core.external.num_damaged - before
        self.report.num_counted += num_counted
        if num_counted != len(read):
            self._violation(
                f"{len(read)} damaged values read, {num_counted} counted in {engine.core.card.engine}", damaged
            )
        self.report.read.update(damaged.pop(name) for name in read)

    def _violation(self, text: str, damaged: dict[bytes, str]) -> None:
        self.report.violations.append(f"round {self.report.num_rounds}: {text}, of {sorted(damaged.values())}")


def fuzz(kind: str, num_mutations: int, *, model: Path, foreign: Path, directory: Path, seed: int) -> DamageReport:
    """Damage values of one kind of store until so many damaged ones were read. Skips where its server is missing."""
    began = time.monotonic()
    with ExitStack() as stack:
        subject = stack.enter_context(subject_of(kind, directory))
        fuzzer = Fuzzer(kind, subject, model, foreign, seed, stack)
        report = fuzzer.report
        while report.num_read < num_mutations and len(report.violations) < 10 and report.num_rounds < num_mutations:
            fuzzer.round(num_mutations - report.num_read)
        if report.num_read < num_mutations and not report.violations:
            report.violations.append(f"only {report.num_read} damaged values were read")
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def models() -> Iterator[tuple[Path, Path]]:
    """A model and the foreign one."""
    with tempfile.TemporaryDirectory(prefix="soak-damage-") as folder:
        model = make_hf_model(Path(folder) / "model", "llama", "float32", initializer_range=0.2)
        yield model, foreign_model(model, Path(folder) / "foreign")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("soak.damage", description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000, help="of values that are read, over all kinds")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="of stores")
    parser.add_argument("--trials", type=int, default=1000, help="of each kind of damage, on each way, for all ranks")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="in which KV travels")
    parser.add_argument("--damages", nargs="*", default=list(DAMAGES), choices=DAMAGES, help="of what travels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="what travelled, to today's table in benchmarks/results/")
    parser.add_argument("--resume", action="store_true", help="leave out what today's table has already")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("pdkv").setLevel(logging.ERROR)  # every damaged value is told
    has_violations = _fuzz_stores(options.kinds, options.mutations, options.seed)
    done = finished(options.trials, options.seed) if options.resume else ()
    for report in fly_all(options.ways, options.damages, options.trials, options.seed, done):
        print(report, flush=True)
        has_violations |= bool(report.violations)
        if options.save:
            save(report)
    return 1 if has_violations else 0


def _fuzz_stores(kinds: Sequence[str], num_mutations: int, seed: int) -> bool:
    """Print what each kind of store has seen. Returns whether anything was violated."""
    reports = []
    with models() as (model, foreign):
        for index, kind in enumerate(kinds):
            share = num_mutations // len(kinds) + (index < num_mutations % len(kinds))
            with tempfile.TemporaryDirectory(prefix="soak-damage-") as folder:
                try:
                    reports.append(fuzz(kind, share, model=model, foreign=foreign, directory=Path(folder), seed=seed))
                except pytest.skip.Exception as skip:
                    print(f"{kind}: skipped, {skip}", flush=True)
                    continue
            print(reports[-1], flush=True)
    total = sum(report.num_read for report in reports)
    print(f"{total} damaged values read, {sum(report.num_counted for report in reports)} counted", flush=True)
    return any(report.violations for report in reports)


if __name__ == "__main__":
    sys.exit(main())
