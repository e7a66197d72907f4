"""The real `nxbucket` command, with the null compiler for target cpu.

    NULL_COMPILER='{"sleep_s": 1}' python tests/null_cli.py compile model.yaml

With NULL_CLI_MODULES set to a file, the names of all imported modules are written there at exit.
"""

import atexit
import os
import sys
from pathlib import Path

from nxbucket.compile import compiler
from nxbucket.toolkit import cli

if __name__ == "__main__":
    compiler.FACTORIES["cpu"] = "null_compiler:NullCompiler"
    if record := os.environ.get("NULL_CLI_MODULES"):
        path = Path(record)
        atexit.register(lambda: path.write_text("\n".join(sys.modules)))
    cli.main()
