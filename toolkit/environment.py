"""The environment variables nxbucket reads, and those that look as if it did."""

from collections.abc import Iterator, Mapping

from nxbucket.toolkit.refusals import nearest

ENVIRONMENT = ("NXBUCKET_ACTIVE", "NXBUCKET_CACHE_DIR", "NXBUCKET_DEBUG")


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each NXBUCKET_ variable that nothing reads."""
    for name in sorted(environ):
        if name.startswith("NXBUCKET_") and name not in ENVIRONMENT:
            near = nearest(name, ENVIRONMENT)
            ending = f"; did you mean {near}?" if near else f"; known: {', '.join(ENVIRONMENT)}"
            yield f"unknown environment variable {name}{ending}"
