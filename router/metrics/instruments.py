"""What looks at a router beside its metrics, where it is asked for."""

from typing import NamedTuple

from pdkv.config import ObservabilityConfig
from pdkv.router.metrics.loop_watchdog import LoopWatchdog
from pdkv.router.metrics.tracing import Tracer


class Instruments(NamedTuple):
    """Each is None where nobody wants it; then it costs nothing."""

    tracer: Tracer | None = None
    watchdog: LoopWatchdog | None = None

    def start(self) -> None:
        """In the running event loop."""
        if self.watchdog is not None:
            self.watchdog.start()

    def close(self) -> None:
        """Idempotent."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self.tracer is not None:
            self.tracer.close()


NO_INSTRUMENTS = Instruments()


def make_instruments(config: ObservabilityConfig) -> Instruments:
    """As the options say. Raises ConfigError."""
    return Instruments(
        tracer=Tracer(config.otlp_endpoint) if config.otlp_endpoint is not None else None,
        watchdog=LoopWatchdog(config.loop_watchdog_ms / 1e3) if config.loop_watchdog_ms else None,
    )
