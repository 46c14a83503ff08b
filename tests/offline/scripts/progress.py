"""A progress bar of the program's own."""

import functools
import io

from script_answers import MODEL, QUESTIONS, greedy_text
from tqdm import tqdm

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    shown = io.StringIO()
    llm = LLM(model=MODEL)
    outputs = llm.generate(
        QUESTIONS, SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=functools.partial(tqdm, file=shown)
    )
    assert "3/3" in shown.getvalue()
    assert [output.outputs[0].text for output in outputs] == [greedy_text(question, 6) for question in QUESTIONS]
