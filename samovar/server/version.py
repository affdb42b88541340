"""The version this server reports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """The installed package's version; "source" when run from a tree that is not installed."""
    try:
        return installed_version("samovar")
    except PackageNotFoundError:
        return "source"
