"""`nxbucket` in this process, with the null compiler for target cpu."""

import sys

import pytest

from nxbucket.compile import compiler
from nxbucket.toolkit import cli


def cli_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    monkeypatch.setitem(compiler.FACTORIES, "cpu", "null_compiler:NullCompiler")
    monkeypatch.setattr(sys, "argv", ["nxbucket", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    return code if isinstance(code, int) else 0, *capsys.readouterr()
