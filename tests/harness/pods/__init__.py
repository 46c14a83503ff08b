"""The chart as a cluster sees it: objects rendered from it, and the commands of its pods."""

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "helm" / "pdkv"
VALUES = sorted((CHART / "ci").glob("*.yaml"))

Object = dict[str, Any]


@cache
def _chart() -> Any:
    import helm_python

    return helm_python.Chart.load(CHART)


def render(values: Object) -> list[Object]:
    """The objects of a release "demo" in the namespace "serving"."""
    files = _chart().render(values, name="demo", namespace="serving")
    texts = [text for file, text in files.items() if file.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def read_values(file: Path) -> Object:
    """A file of values; one of comments alone has none."""
    return yaml.safe_load(file.read_text()) or {}


def pods_of(found: Object) -> Object:
    """The spec of the pods of a Deployment."""
    spec: Object = found["spec"]["template"]["spec"]
    return spec


class Command(NamedTuple):
    """What a pod's container runs."""

    argv: list[str]
    environment: dict[str, str]


def command_of(found: Object, *, name: str, address: str, files: Path) -> Command:
    """The command of a Deployment's pod of this name and address, with `files` for the volumes that it mounts."""
    (container,) = pods_of(found)["containers"]
    fields = {"metadata.name": name, "status.podIP": address}
    environment = {
        each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    mounts = {each["mountPath"]: str(files / each["name"]) for each in container["volumeMounts"]}

    def at_home(text: str) -> str:
        for variable, value in environment.items():
            text = text.replace(f"$({variable})", value)
        for path, folder in mounts.items():
            if path != "/dev/shm":
                text = text.replace(f"{path}/", f"{folder}/") if text != path else folder
        return text

    argv = [*container["command"], *container["args"]]
    return Command([at_home(word) for word in argv], {key: at_home(value) for key, value in environment.items()})
