"""Building blocks for tests of pdkv, and of third-party connectors and policies. Provisional.

Names may change until the connector interface has a final number (docs/testing.md). The engines are in
`pdkv.testing.engine`, deployments in `pdkv.testing.deployment`: importing the clock imports no engine.
"""

from pdkv.testing.clock import VirtualClock, VirtualLoop, VirtualUvloop

__all__ = ["VirtualClock", "VirtualLoop", "VirtualUvloop"]
