"""Which versions of libraries are installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata


def version_of(library: str) -> str | None:
    """The library's version; None where it is not installed, such as tightfit itself where a checkout runs."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """The version of each library that is installed, by its name."""
    return {name: found for name in libraries if (found := version_of(name)) is not None}
