"""Safetensors files of zeros, from names, dtypes and shapes: no torch."""

import json
import struct
from math import prod
from pathlib import Path

from nxbucket.compile.programs.weights import weight_specs
from nxbucket.toolkit.architecture import Architecture

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) by name, in the format's own dtype names."""


def tensors_of(architecture: Architecture) -> Tensors:
    """What a checkpoint of this architecture holds, in bfloat16."""
    return {
        source: ("BF16", spec.source_shape(i))
        for spec in weight_specs(architecture)
        for i, source in enumerate(spec.sources)
    }


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
