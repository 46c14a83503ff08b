"""Requests are given up while others go on; outputs have what is new."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

if __name__ == "__main__":
    engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL, max_num_seqs=4))
    sampling_params = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    engine.add_request("endless", QUESTIONS[0], endless)
    engine.add_request("ends", QUESTIONS[1], sampling_params)
    texts = {"endless": "", "ends": ""}
    while engine.get_num_unfinished_requests() == 2:
        for output in engine.step():
            delta = output.outputs[0].text
            texts[output.request_id] = delta if output.request_id == "endless" else texts["ends"] + delta
    assert engine.has_unfinished_requests()
    engine.abort_request(["endless", "unknown"])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert texts["ends"] == greedy_text(QUESTIONS[1], 12)
    engine.add_request("endless", QUESTIONS[2], sampling_params, priority=1)
    last = ""
    while engine.has_unfinished_requests():
        last += "".join(output.outputs[0].text for output in engine.step())
    assert last == greedy_text(QUESTIONS[2], 12)
