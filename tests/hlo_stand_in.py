"""A lowering for tests: an HloModuleProto with a program's entry signature and no instructions.

Milliseconds, no torch, no jax. `NeuronCompilerOnly` is the product's compiler with this in front.
"""

from nxbucket.compile.canonical import canonical_json
from nxbucket.compile.compiler import Lowered
from nxbucket.compile.neuron.compiler import NeuronCompiler
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.signature import TensorSpec

PRIMITIVE_TYPE = {"int32": 4, "float16": 10, "float32": 11, "bfloat16": 16}


class NeuronCompilerOnly(NeuronCompiler):
    def lowering_versions(self) -> dict[str, str]:
        return {"lowering": "stand-in"}

    def lower_to_hlo(self, program: BucketProgram) -> Lowered:
        hlo = entry_only_hlo(program)
        return Lowered(hlo, hlo)


def entry_only_hlo(program: BucketProgram) -> bytes:
    signature = program.signature
    shape = b"".join(_field(1, _shape(t)) for t in signature.inputs)
    result = _number(2, 13) + b"".join(_field(4, _shape(t)) for t in signature.outputs)
    # Whatever else tells programs apart goes into the names, as it would into the instructions.
    name = canonical_json([program.name, program.architecture.as_json()])
    return _field(1, name) + _field(2, b"main") + _field(4, shape + _field(2, result))


def _shape(tensor: TensorSpec) -> bytes:
    dimensions = b"".join(_varint(n) for n in tensor.shape)
    return _number(2, PRIMITIVE_TYPE[tensor.dtype]) + _field(3, dimensions)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
