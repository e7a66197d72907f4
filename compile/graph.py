"""The canonical form of an exported graph: equal bytes for equal graphs, in any process."""

from typing import Any

import torch
from torch.export import ExportedProgram

from nxbucket.compile.canonical import canonical_json, sha256_hex


def canonical_graph(exported: ExportedProgram) -> bytes:
    """Nodes by position, operators by name, shapes and dtypes of every value, constants by digest.

    Names torch makes up, source lines and metadata are left out, so that moving a line of a program
    does not change it. Raises TypeError for an argument this does not know how to write down.
    """
    graph_signature = exported.graph_signature
    return canonical_json(
        {
            "nodes": _nodes(exported.graph_module),
            "inputs": [
                {"kind": spec.kind.name, "constant": _constant(exported, spec.target)}
                for spec in graph_signature.input_specs
            ],
            "outputs": [spec.kind.name for spec in graph_signature.output_specs],
        }
    )


def _nodes(module: torch.fx.GraphModule) -> list[dict[str, Any]]:
    positions = {node: i for i, node in enumerate(module.graph.nodes)}
    return [
        {
            "op": node.op,
            "target": _target(node, module),
            "args": _plain(node.args, positions),
            "kwargs": _plain(node.kwargs, positions),
            "value": _value(node.meta.get("val")),
        }
        for node in module.graph.nodes
    ]


def _target(node: torch.fx.Node, module: torch.fx.GraphModule) -> Any:
    """An operator's name; for the body or the condition of a loop, its nodes, not its name."""
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":
        held = getattr(module, str(node.target), None)
        if isinstance(held, torch.fx.GraphModule):
            return _nodes(held)
        raise TypeError(f"canonical graph: cannot write down the attribute {node.target}")
    return str(node.target)


def _constant(exported: ExportedProgram, target: str | None) -> str | None:
    if target is None:
        return None
    tensor = exported.constants.get(target)
    if tensor is None:
        tensor = exported.state_dict[target]
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {sha256_hex(raw)}"


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride())]
    if isinstance(value, (tuple, list)):
        return [_value(v) for v in value]
    return None


def _plain(arg: Any, positions: dict[torch.fx.Node, int]) -> Any:
    if isinstance(arg, torch.fx.Node):
        return {"node": positions[arg]}
    if isinstance(arg, (tuple, list)):
        return [_plain(a, positions) for a in arg]
    if isinstance(arg, dict):
        return {str(k): _plain(v, positions) for k, v in arg.items()}
    if isinstance(arg, slice):
        return {"slice": [_plain(v, positions) for v in (arg.start, arg.stop, arg.step)]}
    if arg is None or isinstance(arg, (bool, int, str)):
        return arg
    if isinstance(arg, float):
        return {"float": arg.hex()}
    if isinstance(arg, (torch.dtype, torch.layout, torch.device, torch.memory_format)):
        return str(arg)
    raise TypeError(f"canonical graph: cannot write down {type(arg).__name__} {arg!r}")
