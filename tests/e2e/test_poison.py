"""Prompts that end the engine in whose step they are, among others: they alone fail."""

import asyncio
from pathlib import Path

from deployments import Launch
from kills import FEW_TOKENS
from traffic import Answer, Ask, client_of, send_all, wait_for_engines

POISON = [77] * 8
"""How the prompts begin that no engine survives."""

CONNECTOR = f"""
import os

from pdkv.connectors.shared_memory.connector import SharedMemoryConnector as Poisoned
from pdkv.engine.worker.executor import InProcessExecutor

launch, poisons = InProcessExecutor.launch, set()


def poisoned(self, plan):
    poisons.update(new.key for new in plan.new if new.prompt_token_ids[:8] == {POISON})
    if any(scheduled.key in poisons for scheduled in plan.scheduled):
        os._exit(77)
    return launch(self, plan)


InProcessExecutor.launch = poisoned
"""
"""Engines that import it end in the step that has a poisonous request, as with a kernel that crashes on it."""


def test_of_three_prompts_that_end_real_engines_and_30_others_those_three_fail(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "poisoned.py").write_text(CONNECTOR)
    flags = ("--prefill", "2", "--decode", "1", "--connector", "poisoned:Poisoned")
    deployment = launch(*flags, environment={"PYTHONPATH": str(tmp_path)})
    prompts = [f"Question {i}: " + "and so on, " * (i % 5) for i in range(30)]
    asks = [Ask(prompt, 20, stream=bool(i % 2), fields=FEW_TOKENS) for i, prompt in enumerate(prompts)]

    async def ask_all(asks: list[Ask]) -> list[Answer]:
        async with client_of(deployment) as client:
            return await send_all(client, asks, at_once=len(asks))

    expected = [answer.token_ids for answer in asyncio.run(ask_all(asks))]
    poisons = [Ask([*POISON, *range(100, 110 + i)], 20) for i in range(3)]
    mixed = [*asks[:10], poisons[0], *asks[10:15], *poisons[1:], *asks[15:]]
    answers = dict(zip(map(id, mixed), asyncio.run(ask_all(mixed)), strict=True))
    assert [answers[id(ask)].token_ids for ask in asks] == expected
    for poison in poisons:
        error = answers[id(poison)].error
        assert error is not None
        assert error["code"] == "kills_engines", error
    wait_for_engines(deployment)
