"""What a machine without a GPU can say of parts: all that they import, start and read is there, and is understood."""

import importlib
import pkgutil
from collections.abc import Sequence

import pdkv.kernels
from benchmarks.servers import launch_arguments
from pdkv.cli.main import make_parser
from pdkv.config import DEFAULT_MODEL

_SKIPPED = "skipped: there is no CUDA device"


def dry_run(parts: Sequence[str], scale: str) -> int:
    """Look at each part. Returns 0 if all could begin; what could not is named in the last lines."""
    failed = []
    for part in parts:
        try:
            print(f"{part}: {_look_at(part, scale)}; {_SKIPPED}", flush=True)
        except (Exception, SystemExit) as error:
            failed.append(f"{part}: {type(error).__name__}: {error}")
    print("\n".join(["failed:", *failed] if failed else ["nothing failed, and nothing was measured"]))
    return int(bool(failed))


def _look_at(part: str, scale: str) -> str:
    """What was found of a part. Raises what keeps it from beginning."""
    module = importlib.import_module(f"benchmarks.gpu.{part}")
    assert callable(module.run), part
    kernels = [name for _, name, _ in pkgutil.iter_modules(pdkv.kernels.__path__) if name.endswith("_triton")]
    for name in kernels:
        importlib.import_module(f"pdkv.kernels.{name}")
    commands = module.launches("cuda", scale) if hasattr(module, "launches") else []
    for prefill, decode, options in commands:
        make_parser().parse_args(launch_arguments(DEFAULT_MODEL, prefill, decode, 0, options))
    if not (DEFAULT_MODEL / "config.json").is_file():
        raise FileNotFoundError(DEFAULT_MODEL / "config.json")
    models = f"models {', '.join(module.MODELS)}" if hasattr(module, "MODELS") else "the model"
    return f"{len(kernels)} files of kernels, {len(commands)} commands, {models} and what it imports are there"
