"""What grammars may cost an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """Bounds of compilation and of what is kept."""

    compile_timeout_s: float = 10.0  # of one grammar
    cache_bytes: int = 512 << 20  # compiled grammars that are kept
    compile_memory_bytes: int = 1 << 30  # that compiling one grammar may take
    max_waiting: int = 1024  # grammars in the queue
    max_waiting_bytes: int = 64 << 20  # text of them
