"""Runs the kit on one connector and reports the result, for people and programs."""

import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.check.cases import CASES, Case
from pdkv.connector_kit.check.profiles import profile_of
from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.world import NotApplicable, Refused, Setting, World
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import CONNECTORS, check_connector
from pdkv.errors import ConfigError, PdkvError

Status = Literal["passed", "failed", "refused", "skipped"]

CASE_MODULES = ("cases_content", "cases_ownership", "cases_failures", "cases_groups", "cases_tiers", "cases_process")


class CaseReport(msgspec.Struct, frozen=True):
    """The result of one case. `refused`: the connector refuses that shape of peers, as it may."""

    name: str
    status: Status
    detail: str
    covers: list[str]
    proves: str
    seconds: float


class Report(msgspec.Struct, frozen=True):
    """The results of a run; `passed` and `failed` count cases."""

    connector: str
    passed: int
    failed: int
    cases: list[CaseReport]


def all_cases() -> dict[str, Case]:
    """Every case by name, in the order in which they run."""
    for module in CASE_MODULES:
        import_module(f"pdkv.connector_kit.check.{module}")
    return CASES


def check(
    connector: str,
    *,
    options: Mapping[str, str],
    names: Sequence[str] = (),
    quick: bool = False,
    timeout_s: float = 20.0,
    on_case: Callable[[CaseReport], None] = lambda _: None,
    zygote: Zygote | None = None,
) -> Report:
    """Run the kit.

    Args:
        connector: a registry name or "module:Class".
        options: as --connector-config; they override the kit's options for shipped connectors.
        names: the cases to run; none: all.
        timeout_s: time after which an expected event counts as missing; longer than every deadline of the connector.
        on_case: called with each case when it has ended.
        zygote: forks the processes, for callers that check several connectors; by default the run has its own.

    Raises:
        ConfigError: unknown connector, case or option, or a connector that cannot be built at all.
    """
    cases = all_cases()
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise ConfigError(f"unknown case {unknown[0]!r}; known: {', '.join(cases)}")
    target = CONNECTORS.target(connector)
    profile = profile_of(target, options)
    reports = []
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdkv-check-"))
        own_options = {name: text.replace("{directory}", "/") for name, text in profile.options.items()}
        plan = check_connector(connector, own_options)
        if not plan.one_process:
            _check_is_shared(plan)
        setting = Setting(
            zygote=zygote or stack.enter_context(Zygote(Path(directory))),
            directory=Path(directory),
            connector=connector,
            options=dict(profile.options),
            short_options=dict(profile.short),
            one_process=plan.one_process,
            layouts=plan.layouts,
            timeout_s=timeout_s,
            quick=quick,
        )
        _probe(setting)
        for case in [cases[name] for name in names] or cases.values():
            reports.append(_run(case, setting))
            on_case(reports[-1])
    counts = {status: sum(report.status == status for report in reports) for status in ("passed", "failed")}
    return Report(connector, counts["passed"], counts["failed"], reports)


def _check_is_shared(plan: ConnectorPlan) -> None:
    """Refuse a store that no two processes share, with which every case would fail. Raises ConfigError."""
    url = plan.options.get("url", "")
    if plan.kind == "store" and all(part.startswith("memory://") for part in url.split(",")):
        raise ConfigError(
            f"url={url}: memory:// is each process's own, and the kit's engines are processes: "
            "give a store that they share, such as url=file://{directory}"
        )


def _probe(setting: Setting) -> None:
    """Build one engine, so that errors in the options appear here, and not in every case."""
    with World(setting):
        pass


def _run(case: Case, setting: Setting) -> CaseReport:
    start = MONOTONIC.now()
    status: Status = "passed"
    detail = ""
    try:
        case.run(setting)
    except NotApplicable as error:
        status, detail = "skipped", str(error)
    except Refused as error:
        status, detail = ("refused" if case.name.startswith(("unequal", "all_ranks")) else "failed"), str(error)
    except (PdkvError, AssertionError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = str(error) or f"{type(error).__name__} at {where.name}:{where.lineno}"
        status = "failed"
    return CaseReport(case.name, status, detail, list(case.covers), case.summary, round(MONOTONIC.now() - start, 3))


def print_case(report: CaseReport, out: TextIO) -> None:
    """Print the line of one case."""
    rows = f" ({', '.join(report.covers)})" if report.covers else ""
    detail = f": {report.detail}" if report.detail else ""
    print(f"{report.status:8} {report.name}{rows}  {report.seconds:.1f} s{detail}", file=out, flush=True)


def print_totals(report: Report, out: TextIO) -> None:
    """Print the last line: how many cases passed, failed, and so on."""
    others = {status: sum(case.status == status for case in report.cases) for status in ("refused", "skipped")}
    extra = "".join(f", {count} {status}" for status, count in others.items() if count)
    print(f"{report.connector}: {report.passed} passed, {report.failed} failed{extra}", file=out)
