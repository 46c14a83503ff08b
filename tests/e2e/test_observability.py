"""One request through real processes: every process's log names it, one line sums it up, a collector gets its spans."""

import json
from contextlib import closing
from typing import Any

import pytest
from deployments import Launch
from otlp_receiver import OtlpReceiver, attributes_of

TRACE, STOPPED = "4bf92f3577b34da6a3ce929d0e0e4736", "4bf92f3577b34da6a3ce929d0e0e4737"


@pytest.mark.parametrize("server", ["router", "front-0"])
def test_a_request_is_named_in_every_process_and_traced(launch: Launch, server: str) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    with closing(OtlpReceiver()) as receiver:
        options = ["--log-level", "debug", "--log-format", "json", "--loop-watchdog-ms", "20"]
        options += ["--router-fronts", "1"] if server != "router" else []
        deployment = launch(*options, "--otlp-endpoint", receiver.endpoint)
        headers = {"x-request-id": "client 7", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        prompt = "A prompt of more than one block, so that its KV goes along."
        reply = deployment.complete(prompt, max_tokens=6, headers=headers)
        assert (reply.status_code, reply.headers["x-request-id"]) == (200, "client 7")
        exposition = deployment.get("/metrics").text
        headers = {"traceparent": f"00-{STOPPED}-00f067aa0ba902b7-01"}
        stop = reply.json()["choices"][0]["text"][3]
        assert deployment.complete(prompt, max_tokens=6, stop=stop, headers=headers).status_code == 200
        assert deployment.stop() == 0
        lines: list[dict[str, Any]] = [json.loads(line) for line in deployment.lines]
    named = [line for line in lines if line.get("request_id") == "client 7"]
    assert {line["process"] for line in named} == {server, "prefill-0", "decode-0"}
    assert {line["trace_id"] for line in named} == {TRACE}
    (access,) = [line for line in named if line["logger"] == "pdkv.access"]
    assert (access["status"], access["outcome"], access["attempts"]) == (200, "ok", 1)
    assert (access["prefill"], access["decode"]) == ("prefill-0", "decode-0")
    assert (access["prompt_tokens"], access["computed"], access["completion_tokens"]) == (len(prompt), len(prompt), 6)
    assert 0 < access["ttft_s"] < access["duration_s"]
    assert not any(prompt in json.dumps(line) for line in lines)
    spans = {span.name: span for span in receiver.spans if span.trace_id.hex() == TRACE}
    assert set(spans) == {"pdkv.request", "pdkv.router", "pdkv.prefill", "pdkv.transfer", "pdkv.decode"}
    assert {span.name for span in receiver.spans if span.trace_id.hex() == STOPPED} == {*spans} - {"pdkv.transfer"}
    for name in ("pdkv.prefill", "pdkv.decode"):
        said = attributes_of(spans[name])
        length_s = (spans[name].end_time_unix_nano - spans[name].start_time_unix_nano) / 1e9
        assert 0 < said["pdkv.ran_s"] <= said["pdkv.queued_s"] + said["pdkv.ran_s"] <= length_s
    assert attributes_of(spans["pdkv.transfer"])["pdkv.bytes"] > 0
    for name in ("vllm:time_to_first_token_seconds_count", "pdkv_loop_lag_seconds_count", "pdkv_kv_transfer_bytes_sum"):
        (sample,) = [line for line in exposition.splitlines() if line.startswith(name)]
        assert float(sample.split()[-1]) > 0
