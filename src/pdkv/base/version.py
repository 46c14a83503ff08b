"""The installed version."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("pdkv")
except PackageNotFoundError:  # a source tree that was never installed
    VERSION = "0+unknown"
