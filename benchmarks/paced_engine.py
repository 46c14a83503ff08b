"""An engine process that computes nothing: the real socket, scheduler and messages, and steps at a pace.

python -m benchmarks.paced_engine ENDPOINT PACE_S NUM_SEQS    # says "ready" on standard output; runs until SIGTERM

So a router can be measured with more streams than this machine could compute, on the cores that it leaves idle.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from benchmarks.step_thread import LAYOUT, VOCAB_SIZE
from pdkv.build_core import build_core
from pdkv.config import HandoffConfig
from pdkv.connectors.base import NO_TRANSFERS, EngineCard
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.engine.executor import Executor
from pdkv.engine.plan import SampledTokens, StepOutput, StepPlan
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.launch.engine_process import Notifier, serve
from pdkv.wire.engine_server import EngineServer

NAME, EPOCH = "decode-0", "1"
MAX_LEN = 1024
STEP_TOKENS = 1 << 17
BLOCKS_PER_SEQ = 4
EOS = 1


class Paced(Executor):
    """Draws a token per request and step, of which no two in a row are equal; steps begin `pace_s` apart at least."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._next = 0.0

    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(max(self._next - time.monotonic(), 0.0))
        self._next = time.monotonic() + self._pace_s
        token_id = 100 + plan.step_id % 2000
        sampled = {share.key: SampledTokens([token_id], None) for share in plan.scheduled if share.samples}
        return StepOutput(plan.step_id, sampled, {}, NO_TRANSFERS)

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        pass

    def shutdown(self) -> None:
        pass


def run(endpoint: str, pace_s: float, num_seqs: int) -> None:
    """An aggregated engine of NAME, until SIGTERM."""
    num_blocks = num_seqs * BLOCKS_PER_SEQ + MAX_LEN // LAYOUT.block_size
    card = EngineCard(
        engine=NAME, epoch=EPOCH, role="any", pid=os.getpid(), connector="", kind="pull", content_addressed=False,
        orders=[], model="none", layout=LAYOUT, hash_block_size=LAYOUT.block_size, num_blocks=num_blocks,
        max_model_len=MAX_LEN, max_num_seqs=num_seqs, max_num_batched_tokens=STEP_TOKENS,
    )  # fmt: skip
    core = build_core(
        card=card,
        executor=Paced(pace_s),
        connector=None,
        block_table=LocalBlockTable(num_blocks),
        handoff=HandoffConfig(),
        limits=SchedulerLimits(num_seqs, STEP_TOKENS),
        eos_token_ids=[EOS],
        vocab_size=VOCAB_SIZE,
        shutdown=lambda: None,
    )
    server = EngineServer(endpoint, card, core.watch)
    notifier = Notifier()
    notifier.stop_on(signal.SIGTERM)
    print("ready", flush=True)
    try:
        serve(core, server, notifier)
    finally:
        server.close()
        core.shutdown()


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    endpoint, pace_s, num_seqs = arguments
    run(endpoint, float(pace_s), int(num_seqs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
