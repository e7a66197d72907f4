"""Fixtures that several folders share; what they do is in modules with names."""

from example_model import artifact_env, example

__all__ = ["artifact_env", "example"]
