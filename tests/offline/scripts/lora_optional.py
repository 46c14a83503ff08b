"""A program that would use adapters if there were some."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

try:
    from pdkv import LoRARequest
except ImportError as error:
    assert "merge it into the weights" in str(error)
    LoRARequest = None

if __name__ == "__main__":
    lora_path = None
    llm = LLM(model=MODEL, enable_lora=lora_path is not None)
    request = LoRARequest("adapter", 1, lora_path) if lora_path else None
    outputs = llm.generate(QUESTIONS, SamplingParams(temperature=0.0, max_tokens=4), lora_request=request)
    assert [output.outputs[0].text for output in outputs] == [greedy_text(question, 4) for question in QUESTIONS]
