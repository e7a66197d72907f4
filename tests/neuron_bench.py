"""A folder with a model file for a Neuron target, and `nxbucket` with the stand-in on its PATH."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from neuronx_cc_stand_in import StandIn, install, recorded
from null_compiler import model_file

from nxbucket.compile.cache import ArtifactCache, Hit

NEURON_CLI = Path(__file__).parent / "neuron_cli.py"
FIRST, SECOND = "prefill_s32", "decode_b1"


class NeuronBench:
    def __init__(
        self,
        folder: Path,
        extra: str = "target: trn2\n",
        prefill: tuple[int, ...] = (32,),
        decode: tuple[int, ...] = (1,),
    ) -> None:
        self.folder = folder
        model_file(folder, prefill, decode, extra)
        self.path = install(folder / "bin")

    def start(
        self, *arguments: str, path: str | None = None, env: dict[str, str] | None = None, **o: Any
    ) -> "subprocess.Popen[str]":
        """`nxbucket ARGUMENTS`. Other options are the stand-in's; `path` replaces its PATH."""
        stand_in = StandIn(events=str(self.folder), **o)
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON", "NXBUCKET"))}
        search = f"{self.path}{os.pathsep}{os.defpath}" if path is None else path
        return subprocess.Popen(
            [sys.executable, str(NEURON_CLI), *arguments],
            cwd=self.folder,
            env={**plain, "PATH": search, **stand_in.environ(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def compile(self, *arguments: str, **options: Any) -> tuple[int, dict[str, Any]]:
        done = self.run("compile", "--json", *arguments, **options)
        return done.returncode, json.loads(done.stdout)

    def compiled(self) -> list[str]:
        return [name for kind, name, _ in recorded(self.folder) if kind == "compile"]

    def pids(self) -> set[int]:
        return {pid for _, _, pid in recorded(self.folder)}

    def forget_events(self) -> None:
        (self.folder / "ncc_events").unlink(missing_ok=True)

    def log(self, program: dict[str, Any]) -> str:
        return (self.folder / "cache/logs" / f"{program['key']}.log").read_text()

    def assert_nothing_wrong_is_published(self) -> None:
        """What `cache verify` looks at. Also: no work folder is left."""
        cache = ArtifactCache(self.folder / "cache")
        assert all(isinstance(cache.lookup(key), Hit) for key in cache.all_keys())
        assert list((self.folder / "cache" / "tmp").iterdir()) == []
