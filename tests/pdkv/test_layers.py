"""Imports run one way: a folder imports those below it, and no two modules import each other, not even lazily."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("connectors", "decode", "engine", "grammar", "kernels", "kv_store", "models", "prefill", "router")

LAYERS = (
    "pdkv.errors",
    "pdkv.base",
    "pdkv.sampling",
    "pdkv.logits_processors",
    "pdkv.host",
    "pdkv.grammar",
    "pdkv.parsers",
    "pdkv.wire.types",
    "pdkv.wire.kv",
    "pdkv.wire.tiers",
    "pdkv.wire.profiles",
    "pdkv.wire.reports",
    "pdkv.wire.decoding",
    "pdkv.wire.messages",
    "pdkv.wire",
    "pdkv.kernels",
    "pdkv.config",
    "pdkv.kv_store",
    "pdkv.models",
    "pdkv.text",
    "pdkv.grammar.matching",
    "pdkv.connectors.transfer.planning",
    "pdkv.connectors.block_table",
    "pdkv.connectors.step_done",
    "pdkv.connectors.plan",
    "pdkv.connectors.base",
    "pdkv.connectors.registry",
    "pdkv.connectors.stats",
    "pdkv.connectors.transfer",
    "pdkv.connectors.peer",
    "pdkv.connectors.arena",
    "pdkv.connectors.store",
    "pdkv.connectors",
    "pdkv.engine.plan",
    "pdkv.engine.proposers",
    "pdkv.proposers",
    "pdkv.engine.request",
    "pdkv.engine.hooks",
    "pdkv.engine.kv",
    "pdkv.engine.queues",
    "pdkv.engine.outside",
    "pdkv.engine.worker.batch",
    "pdkv.engine.worker.step_buffers",
    "pdkv.engine.worker.attention",
    "pdkv.engine.worker",
    "pdkv.engine",
    "pdkv.prefill",
    "pdkv.decode",
    "pdkv.assemble",
    "pdkv.offline",
    "pdkv.router.request",
    "pdkv.router.histogram",
    "pdkv.router.engines",
    "pdkv.router.routing",
    "pdkv.router.generations",
    "pdkv.router.admission",
    "pdkv.router.scaling",
    "pdkv.router.metrics",
    "pdkv.router.http.server",
    "pdkv.router.http.read",
    "pdkv.router.http.answer",
    "pdkv.router.http.responses_api",
    "pdkv.router.http.pages",
    "pdkv.router.http",
    "pdkv.router.fronts",
    "pdkv.router",
    "pdkv.launch",
    "pdkv.vllm",
    "pdkv.testing",
    "pdkv.bench",
    "pdkv.simulate",
    "pdkv.connector_kit.rig",
    "pdkv.connector_kit.check",
    "pdkv.connector_kit.bench",
    "pdkv.cli",
)
"""From the bottom up. A module belongs to the longest name that it begins with."""


def modules() -> dict[str, Path]:
    """Every module of the project by name."""
    found = {}
    for folder, prefix in [(ROOT / "src" / "pdkv", "pdkv"), *((ROOT / name, f"pdkv.{name}") for name in FOLDERS)]:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """The project's modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def arrows() -> Mapping[str, set[str]]:
    """What each module imports."""
    return {name: {to for to in imports(path) if to in MODULES and to != name} for name, path in MODULES.items()}


@cache
def layer(module: str) -> int:
    """Where it stands in LAYERS."""
    names = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    assert names, f"{module} belongs to no layer: add it to LAYERS"
    return LAYERS.index(max(names, key=len))


def test_a_module_imports_nothing_above_it() -> None:
    pairs = [(name, to) for name in MODULES for to in arrows()[name] if "pdkv" not in (name, to)]
    assert [(name, to) for name, to in pairs if layer(to) > layer(name)] == []


def test_no_two_modules_import_each_other() -> None:
    """However long the circle is."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for to in sorted(arrows()[module]):
                visit(to, (*path, module))
            done.add(module)

    for module in sorted(MODULES):
        visit(module, ())
