"""Drawn tokens are the same in every run of an LLM with a seed."""

import random

from script_answers import MODEL, QUESTIONS

from pdkv import LLM, SamplingParams

SEED = 42


def main():
    llm = LLM(model=MODEL, seed=SEED)
    outputs = llm.generate(QUESTIONS, SamplingParams(temperature=9.0, top_k=50))
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    before = random.getstate()
    first, second = main(), main()
    print(first)
    assert first == second
    assert len(set(map(tuple, first))) == 3
    assert random.getstate() == before
