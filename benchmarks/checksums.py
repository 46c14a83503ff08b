"""What the checksum of stored values costs: hits in a store that verifies them, in one that is told not to, by turns.

    python -m benchmarks.run store_checksums

Signed values take their turns, too. A hit is timed from the step that begins the load until all of it is in its blocks.
"""

import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.report import Claim, Context
from benchmarks.support import redis_server
from pdkv.connector_kit.bench.measure import measure_in_turns
from pdkv.connector_kit.bench.plan import make_plan
from pdkv.connector_kit.bench.turns import Spread
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.store.lmcache import Unsealed
from pdkv.connectors.store.url import StoreUrlConnector

LENGTHS = (1024, 8192)
LIMIT = 1.05


class UncheckedStore(StoreUrlConnector):
    """The `store` connector with envelopes that are neither computed nor looked at."""

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        self.sealer = Unsealed()


def run(context: Context) -> list[Claim]:
    """A claim for each store and length, of `mid`'s layout."""
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as folder, redis_server() as url:
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16))
        stores = {"file": "file://{directory}"} if context.quick else {"file": "file://{directory}", "redis": url}
        lengths = (64,) if context.quick else LENGTHS
        return [_claim(name, url, length, secret, context) for name, url in stores.items() for length in lengths]


def _claim(name: str, url: str, tokens: int, secret: Path, context: Context) -> Claim:
    ways: Mapping[str, tuple[str, dict[str, str]]] = {
        "checked": ("store", {}),
        "unchecked": (f"{__name__}:UncheckedStore", {}),
        "signed": ("store", {"sign": "true", "sign_key_file": str(secret)}),
    }
    plans = {
        way: make_plan(
            connector,
            options={"url": url, **options},
            layout="mid",
            tokens=[tokens],
            repeats=2 if context.quick else 60,
        )
        for way, (connector, options) in ways.items()
    }
    took = measure_in_turns(plans, tokens)
    figures = {f"{way} ms": Spread.of(each).median for way, each in took.items()}
    ratio = Spread.of_ratios(took["checked"], took["unchecked"])
    return Claim.of(f"{name}, hits of {tokens} tokens, verified / believed", ratio, LIMIT, "lower", figures)
