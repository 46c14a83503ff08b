"""What grammars may cost an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """Bounds of one grammar, and of the processes that match grammars."""

    time_s: float = 2.0  # of a processor, that a grammar may have used and not earned back
    memory_bytes: int = 512 << 20  # that a process may take
    num_processes: int = 8
    max_waiting_chars: int = 64 << 20  # text of grammars that wait for one process
