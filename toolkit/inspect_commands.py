"""`nxbucket inspect`: what a compiled file says of itself, whatever it is called.

Nothing is run, loaded or unpacked to disk; neither torch nor jax is imported for a NEFF or a .pt2.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, examples
from nxbucket.toolkit.cache_commands import CacheDir, open_cache
from nxbucket.toolkit.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from nxbucket.compile.neuron.neff import Neff

app = typer.Typer(rich_markup_mode=None)

HEX = re.compile("[0-9a-f]{4,64}")
ZIP = b"PK\x03\x04"
ANOTHER = "nxbucket compile makes it again; nxbucket cache verify finds the damaged ones"


@app.command(
    epilog=examples(
        "nxbucket inspect program.neff",
        "nxbucket inspect program.hlo --json | jq .opcodes",
        "nxbucket inspect 3f9a1c",
    )
)
def inspect(
    file: Annotated[
        str,
        typer.Argument(
            help="A NEFF, a .pt2 or an HloModuleProto, told apart by content; or a key or a digest "
            "of the cache, or its first digits."
        ),
    ],
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Print what a compiled file says of itself: what it is for, its parts, its tensors.

    Of a key with two blobs the program is shown, and a note names the other.

    Exit 1 for a file that is damaged, and for an HLO that breaks a rule of Neuron's compiler.
    """
    with output.errors_as_json(as_json):
        path = Path(file)
        if not path.is_file():
            path = _blob_of(file, cache_dir)
        with path.open("rb") as f:
            start = f.read(1 << 16)
        from nxbucket.compile.hlo.module import looks_like_hlo
        from nxbucket.compile.neuron.neff import looks_like_neff

        if looks_like_neff(start):
            _inspect_neff(path, as_json)
        elif start.startswith(ZIP):
            _inspect_pt2(path, as_json)
        elif looks_like_hlo(start):
            _inspect_hlo(path, as_json)
        else:
            raise UsageError(
                f"{path} is not a NEFF, .pt2 or HLO",
                hint="Neuron targets have NEFF and HLO, target cpu has .pt2: nxbucket cache ls",
            )


def _blob_of(name: str, cache_dir: Path | None) -> Path:
    """What the cache has under a key or a digest, or the first digits of one."""
    if not HEX.fullmatch(name) or Path(name).exists():
        raise UsageError(f"no file {name}", hint="give a file, or a key of nxbucket cache ls")
    cache = open_cache(cache_dir)
    keys = [key for key in cache.all_keys() if key.startswith(name)]
    digests = [path.name for path in cache.root.glob(f"blobs/sha256/{name[:2]}/{name}*")]
    if len(keys) + len(digests) != 1:
        raise UsageError(
            f"no file {name}, and {len(keys)} keys and {len(digests)} blobs of {cache.root} begin "
            "with it",
            hint="nxbucket cache ls prints the keys; give more digits, or --cache-dir",
        )
    if digests:
        return cache.blob_path(digests[0])
    entry = cache.entry(keys[0])
    if isinstance(entry, str):
        raise ArtifactError(entry, hint=ANOTHER)
    chosen, *others = entry.blobs
    for blob in others:
        output.print_note(f"its {blob.role} is {cache.blob_path(blob.digest)}")
    path = cache.blob_path(chosen.digest)
    if not path.is_file():
        raise ArtifactError(f"{path} is missing", hint=ANOTHER)
    output.print_note(f"{entry.program}, {entry.target}: its {chosen.role} is {path}")
    return path


def _inspect_hlo(file: Path, as_json: bool) -> None:
    """Exit 1 also for a module that breaks a rule of docs/hlo.md."""
    from nxbucket.toolkit.inspect_report import describe_hlo, print_hlo

    described = describe_hlo(file)
    if as_json:
        output.print_json(described)
    else:
        print_hlo(described)
    if not described["ok"]:
        raise typer.Exit(ArtifactError.exit_code)


def _inspect_neff(file: Path, as_json: bool) -> None:
    from nxbucket.compile.neuron.neff import read_neff
    from nxbucket.compile.neuron.neff_archive import MalformedNeff

    try:
        neff = read_neff(file)
    except MalformedNeff as err:
        raise ArtifactError(f"{file} {err}", hint=ANOTHER) from err
    whole = neff.digest != "differs"
    if as_json:
        output.print_json({"ok": whole, "kind": "neff", "file": str(file), **neff.as_json()})
    else:
        _print_neff(file, neff)
    if not whole:
        raise typer.Exit(ArtifactError.exit_code)


def _print_neff(file: Path, neff: "Neff") -> None:
    from nxbucket.compile.neuron.neff import ANY_TARGET, targets_of

    header = neff.header
    known = ", ".join(targets_of(neff.target)) or "unknown to nxbucket"
    if neff.target == ANY_TARGET:
        known = "any"
    packed = "gzip" if neff.compressed else "not compressed"
    rows = [
        ("kind", f"NEFF {header.major}.{header.minor}, package {header.pkg_version}, {packed}"),
        ("size", f"{neff.size_bytes} bytes"),
        ("digest", f"{neff.digest_scheme or ''} {neff.digest}".strip()),
        ("target", f"{known} ({neff.target!r})"),
        ("lnc", str(neff.lnc) if neff.lnc is not None else "not recorded"),
        ("graphs", ", ".join(neff.graphs) or "none"),
        ("name", header.name or "-"),
        ("build", header.build_version or "-"),
        ("uuid", header.uuid),
        ("feature bits", f"{header.feature_bits:#x}"),
    ]
    output.print_table(rows)
    for title, table in (
        (("graph", "kind", "bytes", "tensor"), _tensor_rows(neff)),
        (("bytes", "member"), [(str(size), name) for name, size in neff.members]),
    ):
        if table:
            output.print_data("")
            output.print_table([title, *table])
    for note in neff.notes:
        output.print_note(note)
    if neff.digest == "differs":
        output.print_warning(f"{file} is damaged: its archive is not the one its header names")
        output.print_hint(ANOTHER)


def _tensor_rows(neff: "Neff") -> list[tuple[str, ...]]:
    return [(t.graph, t.kind, str(t.size_bytes), t.name) for t in neff.tensors]


def _inspect_pt2(file: Path, as_json: bool) -> None:
    from nxbucket.compile.package import read_package

    package = read_package(file)
    if as_json:
        output.print_json({"ok": True, "kind": "pt2", "file": str(file), **package})
        return
    rows: list[tuple[str, Any]] = [("kind", "AOTInductor package"), *package.items()]
    shown = [(k, v) for k, v in rows if k not in ("members", "metadata")]
    output.print_table([(k, "not recorded" if v is None else str(v)) for k, v in shown])
    output.print_data("")
    output.print_table(list(package["metadata"].items()) or [("metadata", "none")])
    output.print_data("")
    members = [(str(m["size_bytes"]), m["name"]) for m in package["members"]]
    output.print_table([("bytes", "member"), *members])
