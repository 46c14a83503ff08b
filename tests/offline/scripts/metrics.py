"""What an engine counts."""

from script_answers import MODEL, QUESTIONS

from pdkv import LLM, Counter, Gauge, Histogram, SamplingParams, Vector

if __name__ == "__main__":
    llm = LLM(model=MODEL, disable_log_stats=False)
    outputs = llm.generate(QUESTIONS * 2, SamplingParams(temperature=0.0, max_tokens=6))
    found = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
            found[metric.name] = metric.value
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
            found[metric.name] = metric.value
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram)\n    sum = {metric.sum}\n    count = {metric.count}")
            for bucket_le, value in metric.buckets.items():
                print(f"    {bucket_le} = {value}")
    assert found["vllm:generation_tokens"] == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert found["vllm:prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert found["vllm:request_success"] == 6
    assert found["vllm:num_requests_running"] == 0
