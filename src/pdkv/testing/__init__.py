"""What tests of pdkv, and of connectors and policies outside it, are built from. Provisional.

Names may change until the connector interface has a final number (docs/testing.md).
"""

from pdkv.testing.clock import VirtualClock

__all__ = ["VirtualClock"]
