"""The simulator: the real dispatcher, schedulers and block pools on a virtual clock (docs/simulator.md)."""
