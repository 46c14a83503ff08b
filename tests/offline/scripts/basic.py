"""Complete a list of prompts, with sampling parameters for all."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

prompts = QUESTIONS
sampling_params = SamplingParams(temperature=0.0, top_p=0.95)


def main():
    llm = LLM(model=MODEL)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
        assert generated_text == greedy_text(prompt, 16)


if __name__ == "__main__":
    main()
