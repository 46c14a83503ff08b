"""Prompts as dicts, with what models of images would have beside them."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams, TextPrompt

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
    [one] = llm.generate({"prompt": QUESTIONS[0], "multi_modal_data": None}, sampling_params=sampling_params)
    several = llm.generate([TextPrompt(prompt=QUESTIONS[1]), {"prompt": QUESTIONS[2]}], sampling_params)
    for question, output in zip(QUESTIONS, [one, *several], strict=True):
        assert output.prompt == question
        assert output.outputs[0].text == greedy_text(question, 8)
