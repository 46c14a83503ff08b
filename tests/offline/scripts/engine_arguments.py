"""What programs for large machines say of an engine."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        model=MODEL,
        tokenizer=MODEL,
        tokenizer_mode="auto",
        trust_remote_code=False,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        dtype="float32",
        quantization=None,
        revision=None,
        seed=0,
        gpu_memory_utilization=0.9,
        swap_space=4,
        cpu_offload_gb=0,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        load_format="auto",
    )
    for output in llm.generate(QUESTIONS, SamplingParams(temperature=0.0, max_tokens=6)):
        assert output.outputs[0].text == greedy_text(output.prompt, 6)
