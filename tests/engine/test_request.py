"""Where the prompt's KV came from, over the lives of one request."""

from pdkv.engine.request import Request
from pdkv.sampling.params import SamplingParams
from pdkv.wire.messages import Submit
from pdkv.wire.reports import SourceCounts


def make_request(num_prompt: int) -> Request:
    submit = Submit(
        request_id="r", transfer_id="t", attempt=0, prompt_token_ids=[5] * num_prompt, params=SamplingParams()
    )
    return Request(submit, "router", b"root", 0.0)


def live(request: Request, *, hit: int, external: int = 0, confirmed: int) -> None:
    """One life: what it found, what it loaded, and how far it got."""
    request.num_local_hit, request.num_external, request.num_confirmed = hit, external, confirmed


def test_hits_loads_and_own_work_sum_to_the_prompt() -> None:
    request = make_request(100)
    live(request, hit=32, external=48, confirmed=100)
    assert request.sources() == SourceCounts(computed=20, local_hit=32, store=48)
    request.source_is_peer = True
    assert request.sources() == SourceCounts(computed=20, local_hit=32, remote=48)


def test_a_hit_on_output_counts_no_further_than_the_prompt() -> None:
    request = make_request(20)
    live(request, hit=32, confirmed=40)
    assert request.sources() == SourceCounts(local_hit=20)


def test_what_is_computed_behind_a_preemption_is_recomputed() -> None:
    request = make_request(100)
    live(request, hit=0, external=99, confirmed=100)
    request.restart()
    live(request, hit=16, confirmed=100)
    assert request.sources() == SourceCounts(recomputed=84, local_hit=16)


def test_own_work_that_is_found_again_is_no_hit() -> None:
    request = make_request(100)
    live(request, hit=32, confirmed=80)
    request.restart()
    live(request, hit=64, confirmed=90)
    assert request.sources() == SourceCounts(computed=32, recomputed=36, local_hit=32)
    request.restart()
    live(request, hit=80, confirmed=100)
    assert request.sources() == SourceCounts(computed=32, recomputed=36, local_hit=32)


def test_what_was_computed_twice_is_recomputed_when_it_is_found() -> None:
    request = make_request(100)
    live(request, hit=0, confirmed=100)
    request.restart()
    live(request, hit=32, confirmed=64)
    request.restart()
    live(request, hit=96, confirmed=100)
    assert request.sources() == SourceCounts(computed=64, recomputed=36)


def test_own_work_that_a_store_gives_back_is_no_hit() -> None:
    request = make_request(80)
    live(request, hit=0, external=64, confirmed=81)
    request.restart()
    live(request, hit=16, external=64, confirmed=81)
    assert request.sources() == SourceCounts(computed=16, local_hit=16, store=48)
