"""What held a router's event loop, as its watchdog counts it (`--loop-watchdog-ms`)."""

from prometheus_client.parser import text_string_to_metric_families

WATCHDOG = ("--loop-watchdog-ms", "20")
"""No callback may hold the loop for longer."""


def counted(exposition: str) -> dict[str, int]:
    """Stalls by place and kind, from the text of /metrics."""
    return {
        f"{sample.labels['where']} ({sample.labels['kind']})": int(sample.value)
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == "pdkv_loop_stalls_total"
    }


def own(stalls: dict[str, int]) -> list[str]:
    """Those that are the doing of one callback or thread of the router; not those of many callbacks in a row, nor of a
    machine that has no processor for it.
    """
    return [f"{name}: {count}" for name, count in stalls.items() if name.endswith(("(busy)", "(threads)"))]
