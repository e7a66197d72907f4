"""Which packages are installed here, by their metadata. None of them is imported."""

import importlib.metadata
from collections.abc import Iterable

AWS_INDEX = "https://pip.repos.neuron.amazonaws.com"


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    return {p: version for p in packages if (version := installed_version(p)) is not None}


def is_placeholder(version: str) -> bool:
    """Under the names of AWS's packages PyPI has empty ones, of version 1; AWS's begin at 2."""
    major = version.partition(".")[0]
    return not major.isdecimal() or int(major) < 2
