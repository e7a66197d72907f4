"""Write docs/model-file.md from toolkit/spec.py: keys, types, defaults and what each is for.

    python scripts/model_file_reference.py [--check]

`--check` writes nothing and ends with 1 if the file is not what would be written.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from nxbucket.toolkit import spec
from nxbucket.toolkit.spec_reader import KEYS, TARGETS

OUTPUT = Path(__file__).parents[1] / "docs" / "model-file.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "": spec.DeploySpec,
    "neuron_config": spec.NeuronConfig,
    "compiler": spec.CompilerOptions,
    "artifacts": spec.ArtifactLocations,
}
NOT_FIELDS = {
    "enable_chunked_prefill": (
        "boolean",
        "May be pasted from a vLLM command line. Prompts longer than the largest prefill bucket "
        "always run in chunks, so `true` changes nothing; `false` holds only if "
        "max_num_batched_tokens covers max_model_len.",
    ),
}
TYPES = {int: "integer", bool: "boolean", str: "string", Path: "path", dict: "mapping"}
HEAD = """\
# The model file

<!-- Written by scripts/model_file_reference.py from toolkit/spec.py. Do not edit. -->

`model.yaml` says what is compiled and what is served. Only `model` is required; `nxbucket init
MODEL` writes one with the keys you will want to look at, and `nxbucket validate` prints every
effective value and where it comes from. Names are those of vLLM and of AWS's Neuron plugin, so that
a line can be pasted from either.

An unknown key, a key given twice, a list out of order or a value of the wrong type is an error with
its line, column and mend, never repaired silently; all of them are reported in one run. Integers
are plain decimal (`4096`, not `4k`, `1e3` or `"4096"`), booleans `true` and `false`.

"""


def main() -> None:
    text = reference()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if OUTPUT.is_file() and OUTPUT.read_text() == text else 1)
    OUTPUT.write_text(text)


def reference() -> str:
    return HEAD + "\n".join(_section(name) for name in SECTIONS)


def _section(name: str) -> str:
    lines = [f"## `{name}`" if name else "## Top level", ""]
    if name == "compiler":
        lines += ["Only `march` is an option of target cpu; the others are neuronx-cc's.", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in KEYS[name]:
        lines.append(f"| `{key}` | {' | '.join(_cells(name, key))} |")
    return "\n".join([*lines, ""])


def _cells(section: str, key: str) -> tuple[str, str, str]:
    if key in NOT_FIELDS and not section:
        type_name, about = NOT_FIELDS[key]
        return type_name, "", about
    if not section and key in SECTIONS:
        return "mapping", "", f"See [below](#{key})."
    model = SECTIONS[section]
    about = _docstrings(model)[key]
    if key == "target":
        about += f" Known: {', '.join(TARGETS)}."
    return _type(model.model_fields[key].annotation), _defaults().get(key, ""), about


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        return " or ".join(_type(a) for a in arguments if a is not NoneType)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}s"
    if annotation is NoneType:
        return ""
    return TYPES[origin or annotation]


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field. Pydantic could read them too, at every start of the command."""
    [cls] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(cls, ast.ClassDef)
    found = {}
    for field, after in zip(cls.body, cls.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(after, ast.Expr):
            continue
        if isinstance(field.target, ast.Name) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _defaults() -> dict[str, str]:
    """The table in spec.py's own docstring: many defaults depend on the model or on other keys."""
    return dict(_default_rows(inspect.getdoc(spec) or ""))


def _default_rows(docstring: str) -> Iterator[tuple[str, str]]:
    key, text = "", ""
    for line in docstring.splitlines():
        if line.startswith("     ") and key:
            text += f" {line.strip()}"
            continue
        if key:
            yield key, text
            key = ""
        if line.startswith("    "):
            key, _, text = line.strip().partition(" ")
            text = text.strip()


if __name__ == "__main__":
    main()
