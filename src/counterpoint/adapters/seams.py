"""What the adapters take from frameworks; none is imported before its adapter is used."""

from importlib import import_module, metadata
from typing import Any

from counterpoint.errors import UnsupportedError


def taken(package: str, tested: str, module: str, *names: str) -> list[Any]:
    """Take names from a framework's module.

    Args:
        package: the framework, as it is installed.
        tested: its version that the adapter was written against.

    Raises:
        UnsupportedError: the framework is missing, or this version has them no more.
    """
    try:
        found = import_module(module)
        return [getattr(found, name) for name in names]
    except (ImportError, AttributeError) as error:
        try:
            has = metadata.version(package)
        except metadata.PackageNotFoundError:
            has = "is not installed"
        seam = f"its adapter needs {module}: {', '.join(names)}, as in {package} {tested}"
        raise UnsupportedError(f"{package} {has}: {error}; {seam}") from error
