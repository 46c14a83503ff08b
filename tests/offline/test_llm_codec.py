"""KV that a codec may have changed: who asked for it finds it, and no other engine ever does."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from recall import make_question

from pdkv import LLM, SamplingParams
from pdkv.engine.intake import root_of
from pdkv.errors import IncompatiblePeers
from pdkv.kv_store.base import Arrived, Buffer
from pdkv.kv_store.codecs.registry import CODECS
from pdkv.kv_store.file_store import FileStore
from pdkv.router.engines.fleet import check_compatible
from pdkv.wire.messages import Submit

PARAMS = SamplingParams(temperature=0, max_tokens=8)
QUESTIONS = [make_question(seed, 40) for seed in range(2)]  # 285 tokens each: four values
PROMPTS = [question.prompt for question in QUESTIONS]
ANSWERS = [question.answer for question in QUESTIONS]
LOSSY = tuple(name for name in CODECS.shipped if CODECS.load(name).lossy)


def make_llm(connector: str = "store", **options: str) -> LLM:
    config = {"lookup_timeout_s": "60", **options} if connector == "store" else options
    return LLM(connector=connector, connector_config=config, kv_cache_memory=32 << 20, threads=1)


def found(llm: LLM) -> int:
    """Prompt tokens that an engine finds; what it computes is stored when this returns. Its answers are right."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ANSWERS
    return sum(output.num_cached_tokens for output in outputs)


def files(directory: Path) -> dict[str, bytes]:
    """A file store's values."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", LOSSY)
def test_answers_over_coded_kv_are_right(name: str, tmp_path: Path) -> None:
    for expected in (0, 512):
        with make_llm(url=f"file://{tmp_path}", codec=name) as llm:
            assert found(llm) == expected


def test_an_exact_engine_finds_nothing_that_was_saved_behind_a_lossy_load(tmp_path: Path) -> None:
    """One store for all of them. The lossy ones load, go on from what they loaded, and save that under their keys."""
    url = f"file://{tmp_path}"
    with make_llm(url=url, codec="cachegen") as lossy:
        assert found(lossy) == 0
    with make_llm(url=url, codec="cachegen") as lossy:
        assert found(lossy) == 512
        longer = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
        lossy.generate(longer, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True), use_tqdm=False)
    with make_llm(url=url) as exact:
        assert found(exact) == 0
    before = files(tmp_path)
    with make_llm(url=url, codec="cachegen") as lossy, make_llm(url=url, codec="cachegen", codec_level="2") as coarser:
        assert found(lossy) == 512
        assert found(coarser) == 0
        assert found(lossy) > 512, "its own blocks"
    after = files(tmp_path)
    assert {name: value for name, value in after.items() if name in before} == before
    with make_llm(url=url, codec="raw") as exact:
        assert found(exact) == 512


def test_an_exact_store_beside_a_lossy_one_has_no_exact_keys(tmp_path: Path) -> None:
    """What was loaded from the lossy store, and what was computed behind it, goes into both."""
    exact_url, lossy_url = f"file://{tmp_path}/exact", f"file://{tmp_path}/lossy"
    both = {"connectors": "store,store", "0.url": exact_url, "1.url": lossy_url, "1.codec": "int8"}
    with make_llm(url=lossy_url, codec="int8") as lossy:
        assert found(lossy) == 0
    with make_llm("multi", **both) as llm:
        assert found(llm) == 512
    with make_llm("multi", **(both | {"1.url": f"file://{tmp_path}/empty"})) as llm:
        assert found(llm) == 512, "the exact store has what came from the lossy one, under the lossy one's keys"
    with make_llm(url=exact_url) as exact:
        assert found(exact) == 0
    fresh = f"file://{tmp_path}/fresh"
    with make_llm(url=fresh) as exact:
        assert found(exact) == 0
    with make_llm("multi", **(both | {"0.url": fresh, "1.url": f"file://{tmp_path}/none"})) as llm:
        assert found(llm) == 0


def test_engines_of_other_codecs_hand_nothing_over(tmp_path: Path) -> None:
    """Neither by the router's choice nor by a connector's: not even from the lossy one's own cache."""
    options = {"connectors": "shared_memory,store", "store.url": f"file://{tmp_path}/kv"}
    lossy_options = {**options, "store.codec": "fp8"}
    with make_llm("multi", **options) as exact, make_llm("multi", **lossy_options) as lossy:
        assert found(lossy) == 0
        with pytest.raises(IncompatiblePeers, match=r"codec=fp8-1\.0"):
            check_compatible(exact.card, lossy.card)
        exact.set_peers([lossy.card])
        assert found(exact) == 0
        with make_llm("multi", **lossy_options) as other:
            other.set_peers([lossy.card])
            assert found(other) >= 512


def test_all_keys_of_an_engine_follow_from_its_codec(tmp_path: Path) -> None:
    """Those of its own cache and of its events too: there is one root."""
    submit = Submit(request_id="r", transfer_id="r", attempt=0, prompt_token_ids=[1, 2], params=PARAMS)
    roots: dict[str, bytes] = {}
    for codec, identity in (("raw", ""), ("fp8", "fp8-1.0"), ("int8", "int8-1.0")):
        with make_llm(url=f"file://{tmp_path}", codec=codec) as llm:
            assert llm.card.layout.codec == identity
            roots[codec] = root_of(llm.card, submit)
    with make_llm(url=f"file://{tmp_path}") as llm:
        assert root_of(llm.card, submit) == roots["raw"]
    assert len(set(roots.values())) == 3


def test_what_a_slow_store_does_not_bring_in_time_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value is read and takes twice the time there is. The rest, and the other prompt, are computed."""
    options = {"url": f"file://{tmp_path}", "codec": "cachegen", "staging_bytes": "1", "io_threads": "1"}
    with make_llm(**options, codec_deadline_s="30") as llm:
        assert found(llm) == 0
    with make_llm(**options, codec_deadline_s="30") as llm:
        assert found(llm) == 512
    read = FileStore.read

    def read_slowly(store: FileStore, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        threading.Event().wait(0.2)
        return read(store, keys, out, arrived)

    monkeypatch.setattr(FileStore, "read", read_slowly)
    with make_llm(**options, codec_deadline_s="0.1") as llm:
        assert found(llm) == 64
