"""Proposers by name, and the configuration that names one: vLLM's `--speculative-config`."""

from collections.abc import Mapping

from pdkv.base.options import OptionTexts
from pdkv.base.registry import Registry
from pdkv.engine.proposers.base import Proposer
from pdkv.errors import ConfigError

PROPOSERS: Registry[Proposer] = Registry(
    "proposer",
    "pdkv.proposers",
    {
        "ngram": "pdkv.engine.proposers.lookup:NgramProposer",
        "suffix": "pdkv.engine.proposers.lookup:SuffixProposer",
        "draft_model": "pdkv.engine.worker.draft_model:DraftModelProposer",
        "prediction": "pdkv.engine.proposers.lookup:PredictionProposer",
    },
    "pdkv.engine.proposers.base:Proposer",
)


def check_proposer(config: Mapping[str, str]) -> None:
    """As `make_proposer`, without importing torch: keys of other methods are checked where they run."""
    method = config.get("method", "")
    target = PROPOSERS.target(method) if method else ""
    if config and (target.startswith("pdkv.engine.proposers.") or not (method or "model" in config)):
        make_proposer(config)


def make_proposer(config: Mapping[str, str]) -> Proposer | None:
    """The proposer of a `speculative_config`; None: it is empty.

    Raises:
        ConfigError: an unknown method or key, or a wrong value; the message names it.
    """
    if not config:
        return None
    texts = dict(config)
    method = texts.pop("method", "draft_model" if "model" in texts else "")  # as vLLM has it
    if not method:
        known = ", ".join(sorted(PROPOSERS.targets()))
        raise ConfigError(f"speculative_config requires the key method, one of {known}; got {sorted(config)}")
    kind = PROPOSERS.load(method)
    return kind(kind.options_type.parse(OptionTexts(texts, f"speculative_config of {method}")))
