"""A neuronx-cc for tests: the command line as AWS documents it, NEFFs in the documented layout, and
every kind of bad behaviour that was ever reported, on demand. It compiles nothing.

Written from the documentation and without a line of nxbucket's, so that the two can disagree. It
reads the sizes of a program's inputs and outputs from the HLO that it is given. `install` puts it
into a folder as an executable `neuronx-cc`.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = "NCC_STAND_IN"
TARGETS = ("inf2", "trn1", "trn1n", "trn2", "trn3")
KELF_TARGET = {"inf2": "sunda", "trn1": "sunda", "trn1n": "sunda", "trn2": "cayman", "trn3": "v4"}
ELEMENT_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 16: 2}
"""By xla.PrimitiveType."""
TUPLE = 13


@dataclass(frozen=True)
class StandIn:
    """How it behaves, as JSON in its environment.

    `programs`: by name, what goes wrong; `*` is any. Each is {"do": ..., "times": how often}:
      fail       prints `code` (a list too) and ends with `status`
      signal     ends by the signal `number`
      driver     one of its own processes died of `number`: [F137] and status 70
      hang       takes for ever; so does a child that it starts
      nothing, empty, truncated, damaged   content, and the file is not as it should be
      neff       writes a NEFF with other `target`, `lnc`, `graphs` or `sizes`
    `noise`: bytes of nonsense that it prints first. `children`: starts a child that outlives it.
    `events`: a folder for the record.
    """

    version: str = "2.27.5334.0+f702b353"
    version_on: str = "stdout"
    targets: tuple[str, ...] = TARGETS
    help_style: str = "argparse"
    programs: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: str | None = None
    children: bool = False
    noise: int = 0
    sleep_s: float = 0.0
    layout: str = "gzip-md5"

    def environ(self) -> dict[str, str]:
        return {ENVIRONMENT: json.dumps(asdict(self))}


def install(folder: Path) -> Path:
    """An executable `neuronx-cc` in `folder`, which is for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "neuronx-cc"
    here = Path(__file__).parent
    script.write_text(
        f"#!{sys.executable} -S\nimport sys\nsys.path.insert(0, {str(here)!r})\n"
        "from neuronx_cc_stand_in import main\nmain()\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def main() -> None:
    raw = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    options = StandIn(**raw)
    forbidden = [v for v in ("NEURON_CC_FLAGS", "LD_PRELOAD", "XLA_FLAGS") if v in os.environ]
    if forbidden:
        sys.exit(f"stand-in: {forbidden} must not reach the compiler")
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        _print_version(options)
    elif arguments[:1] == ["list-operators"]:
        print("add\nbroadcast\ndot\ngather\nscatter")
    elif arguments[:2] == ["compile", "--help"] and options.help_style == "paragraph":
        print("  --framework <name>\n      XLA\n  --target <instance_family>\n      Valid values:")
        print("\n".join(f"      {t}" for t in options.targets), "\n  --model-type <model>")
    elif arguments[:1] == ["compile"]:
        _compile(_parser(options).parse_args(arguments[1:]), options)
    else:
        print("usage: neuronx-cc <command> [parameters]", file=sys.stderr)
        sys.exit(2)


def _print_version(options: StandIn) -> None:
    stream = sys.stdout if options.version_on == "stdout" else sys.stderr
    print(f"NeuronX Compiler version {options.version}\n", file=stream)
    print("Python version 3.13.7", file=stream)
    print(f"HWM version {options.version}\nNumPy version 2.4.6", file=stream)


def _parser(options: StandIn) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("neuronx-cc compile", allow_abbrev=False)
    parser.add_argument("model_files")
    parser.add_argument("--framework", choices=["XLA"], required=True)
    parser.add_argument("--target", choices=options.targets, required=True)
    parser.add_argument("--model-type", choices=["generic", "transformer", "unet-inference"])
    parser.add_argument("--auto-cast", choices=["none", "matmult", "all"], default="none")
    parser.add_argument("--auto-cast-type", choices=["bf16", "fp16", "tf32", "fp8_e4m3"])
    parser.add_argument("--logical-nc-config", "--lnc", "-lnc", type=int, dest="lnc")
    parser.add_argument("--optlevel", "-O", type=int, choices=[1, 2, 3], default=2)
    parser.add_argument("--implicit-integer-downcast")
    parser.add_argument("--native-int64", choices=["default", "enabled", "disabled"])
    parser.add_argument("--distribution-strategy", choices=["llm-training"])
    for flag in ("mixed-precision-accumulation", "saturate-infinity", "fast-context-switch"):
        parser.add_argument(f"--enable-{flag}", action="store_true")
    parser.add_argument("--enable-fast-loading-neuron-binaries", action="store_true")
    parser.add_argument("--tensorizer-options")
    parser.add_argument("--logfile", default="log-neuron-cc.txt")
    parser.add_argument("--output", default="file.neff")
    parser.add_argument("--verbose", default="warning")
    return parser


def _compile(args: argparse.Namespace, options: StandIn) -> None:
    Path("global_metric_store.json").write_text("{}")
    Path("nki_work").mkdir(exist_ok=True)
    hlo = Path(args.model_files).read_bytes()
    inputs, outputs = entry_sizes(hlo)
    name = program_name(hlo)
    _note(options, "compile", name, os.getpid())
    _say(args, f"INFO: compiling {name} for {args.target}")
    limit = 2 if args.target in ("trn2", "trn3") else 1
    lnc = args.lnc if args.lnc is not None else limit
    if not 1 <= lnc <= limit:
        _fail(args, ["NCC_EARG001"], 1)
    noise = bytes(range(256)) * 4
    for _ in range(options.noise // len(noise)):
        sys.stdout.buffer.write(noise)
    if options.children:
        child = subprocess.Popen(["sleep", "600"])
        _note(options, "child", name, child.pid)
    time.sleep(options.sleep_s)
    what = _planned(options, name)
    match what.get("do"):
        case "fail":
            codes = what["code"]
            _fail(args, [codes] if isinstance(codes, str) else codes, what.get("status", 70))
        case "signal":
            _say(args, "INFO: about to die")
            os.kill(os.getpid(), what["number"])
            time.sleep(60)
        case "driver":
            number = what["number"]
            _say(args, f"[F{128 + number}] neuronx-cc was forcibly killed - memory?")
            sys.exit(70)
        case "hang":
            child = subprocess.Popen(["sleep", "36000"])
            _note(options, "child", name, child.pid)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(36000)
        case "nothing":
            return
        case "empty":
            Path(args.output).touch()
            return
    faults = what if what.get("do") == "neff" else {}
    neff = make_neff(
        faults.get("sizes", inputs),
        outputs,
        target=faults.get("target", KELF_TARGET[args.target]),
        lnc=faults.get("lnc", lnc),
        graphs=faults.get("graphs", lnc),
        layout=options.layout,
    )
    if what.get("do") == "truncated":
        neff = neff[: len(neff) // 2]
    if what.get("do") == "damaged":
        neff = neff[:1500] + bytes([neff[1500] ^ 1]) + neff[1501:]
    Path(args.output).write_bytes(neff)
    print("Compiler status PASS")


def _planned(options: StandIn, name: str) -> dict[str, Any]:
    what = options.programs.get(name, options.programs.get("*", {}))
    times = what.get("times")
    if times is not None and options.events is not None:
        events = [event[:2] for event in recorded(Path(options.events))]
        if events.count(("compile", name)) > times:
            return {}
    return what


def _say(args: argparse.Namespace, line: str) -> None:
    print(line, flush=True)
    with Path(args.logfile).open("a") as log:
        log.write(f"2026-11-30T00:00:00Z {line}\n")


def _fail(args: argparse.Namespace, codes: list[str], status: int) -> None:
    for code in codes:
        kind = "INTERNAL_ERROR" if code.startswith("NCC_I") else "ERROR"
        _say(args, f"[{kind}] [{code}] this did not go well - see the documentation")
    sys.exit(status)


def _note(options: StandIn, kind: str, name: str, pid: int) -> None:
    if options.events is not None:
        with (Path(options.events) / "ncc_events").open("a") as f:
            f.write(f"{kind} {name} {pid}\n")


def recorded(events: Path) -> list[tuple[str, str, int]]:
    """(kind, program, pid), in order."""
    try:
        lines = (events / "ncc_events").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(k, n, int(pid)) for k, n, pid in (line.split() for line in lines)]


def make_neff(
    inputs: list[int],
    outputs: list[int],
    *,
    target: str = "cayman",
    lnc: int = 1,
    graphs: int | None = None,
    layout: str = "gzip-md5",
    extra: dict[str, bytes] | None = None,
) -> bytes:
    """`layout` names the archive's form and its digest: gzip-md5 or plain-sha256."""
    var: dict[str, Any] = {}
    for kind, sizes in (("input", inputs), ("output", outputs)):
        for i, size in enumerate(sizes):
            var[f"{kind}{i}"] = {"type": kind, "var_id": len(var), "size": size}
    var["tmp"] = {"type": "virtual", "var_id": len(var), "size": 4096}
    names = [f"sg{i:02}" for i in range(lnc if graphs is None else graphs)]
    kelf = {
        "version": "1.0",
        "target": target,
        "graphs": [{"name": n, "definition": f"{n}/def.json"} for n in names],
    }
    files = {
        "kelf-0.json": json.dumps(kelf).encode(),
        "neff.json": b"{}",
        "info.json": b'{"compiler": "stand-in"}',
        "hlo_metrics.json": b"{}",
    }
    for n in names:
        files[f"{n}/def.json"] = json.dumps({"name": n, "var": var}).encode()
        files[f"{n}/pe.json"] = b'{"dma": []}'
        files[f"{n}/pe.bin"] = os.urandom(256)
    return pack(files | (extra or {}), lnc=lnc, layout=layout)


def pack(files: dict[str, bytes], *, lnc: int = 1, layout: str = "gzip-md5") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return with_header(buffer.getvalue(), lnc=lnc, layout=layout)


def with_header(archive: bytes, *, lnc: int = 1, layout: str = "gzip-md5") -> bytes:
    if layout == "gzip-md5":
        archive = gzip.compress(archive, mtime=0)
        digest, version = hashlib.md5(archive).digest() + b"0" * 16, 2
    else:
        digest, version = hashlib.sha256(archive).digest(), 1
    build = b"2.27.5334.0%kaena@f702b353"
    header = struct.pack("<5Q128s", version, 1024, len(archive), 2, 0, build)
    header += struct.pack("<I32s16s256sI64sQI", 1, digest, os.urandom(16), b"program", 1,
                          bytes([1]), 0, lnc)  # fmt: skip
    return header.ljust(1024, b"\0") + archive


def program_name(hlo: bytes) -> str:
    """nxbucket's name: the first parameter is token ids, the fourth the block table."""
    shapes = list(_parameters(_program_shape(hlo)))
    (_, ids), (_, table) = shapes[0], shapes[3]
    return f"prefill_s{ids[0]}" if len(table) == 1 else f"decode_b{ids[0]}"


def entry_sizes(hlo: bytes) -> tuple[list[int], list[int]]:
    """Bytes of each parameter and each result of the entry computation."""
    shape = _program_shape(hlo)
    result = next(v for n, v in _fields(shape) if n == 2)
    kind, _ = _shape(result)
    results = [v for n, v in _fields(result) if n == 4] if kind == TUPLE else [result]
    return [_bytes(*s) for s in _parameters(shape)], [_bytes(*_shape(r)) for r in results]


def _program_shape(hlo: bytes) -> bytes:
    """HloModuleProto.host_program_shape."""
    return next(bytes(v) for n, v in _fields(hlo) if n == 4)


def _parameters(program_shape: bytes) -> Iterator[tuple[int, list[int]]]:
    return (_shape(v) for n, v in _fields(program_shape) if n == 1)


def _shape(raw: bytes) -> tuple[int, list[int]]:
    """ShapeProto: element type and dimensions, packed or not."""
    kind, dimensions = 0, []
    for number, value in _fields(raw):
        if number == 2:
            kind = value
        elif number == 3 and isinstance(value, int):
            dimensions.append(value)
        elif number == 3:
            at = 0
            while at < len(value):
                size, at = _varint(value, at)
                dimensions.append(size)
    return kind, dimensions


def _bytes(kind: int, dimensions: list[int]) -> int:
    size = ELEMENT_BYTES[kind]
    for n in dimensions:
        size *= n
    return size


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Protobuf's wire format: varints as numbers, the rest as bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        if key & 7 == 0:
            value, at = _varint(raw, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = _varint(raw, at)
        else:
            size = {1: 8, 5: 4}[key & 7]
        if at + size > len(raw):
            raise ValueError("the HLO is cut off")
        yield key >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (raw[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if raw[at - 1] < 0x80:
            return value, at


if __name__ == "__main__":
    main()
