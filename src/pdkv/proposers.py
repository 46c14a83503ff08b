"""The interface for authors of proposers (docs/speculation.md)."""

from pdkv.engine.plan import NewRequest
from pdkv.engine.proposers.base import Asked, Guesses, Place, Proposer, ProposerOptions, TokenProposer

__all__ = ["Asked", "Guesses", "NewRequest", "Place", "Proposer", "ProposerOptions", "TokenProposer"]
