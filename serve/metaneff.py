"""MetaNeff: what torch_neuronx's SPMDModel is told of a NEFF's tensors. A protobuf message.

Its .proto is not published. Field names and how they are filled: NxD
(aws-neuron/neuronx-distributed fbac349b, trace/hlo_utils.py `prepare_metaneff_for_wlt_hlo`,
trace/functions.py, trace/nxd_model/nxd_model.py). Field and enum numbers: public notes that decode
them from torch_neuronx 2.9.0.2.13's libtorchneuron.so (its parser's tags, the descriptor inside).
NOT VERIFIED on a device. With torch_neuronx at hand, `torch_neuronx.proto.metaneff_pb2` settles it:
scripts/check_on_hardware.py compares.
"""

from collections.abc import Iterator

from nxbucket.compile.hlo.wire import BYTES, VARINT, Field, packed, write_message
from nxbucket.compile.signature import ProgramSignature, Role, TensorSpec

# MetaNeff
INPUT_TENSORS, OUTPUT_TENSORS, SERIALIZED_GRAPH_DEF, OUTPUT_ALIASES_TO = 1, 2, 4, 6
MAP_KEY, MAP_VALUE = 1, 2
# MetaTensor
NAME, SHAPE, DATA_TYPE, CHECKPOINT_KEY, TYPE, USER_INPUT_KEY = 1, 2, 3, 6, 7, 8
# MetaTensor.DataType
DATA_TYPES = {"float32": 1, "int32": 2, "float16": 12, "bfloat16": 14}
# MetaTensor.Type
TYPES: dict[Role, int] = {"input": 1, "kv_cache": 2, "weight": 3}
"""USER_INPUT, INPUT_STATE, INPUT_WEIGHT."""


def metaneff(signature: ProgramSignature, hlo: bytes = b"") -> bytes:
    """Tensors in the module's own order, under the names that the runtime looks up.

    NxD: the name "needs to be `input#` to avoid a `ddrs_create_lookup_key` error".
    """
    return write_message(_fields(signature, hlo))


def _fields(signature: ProgramSignature, hlo: bytes) -> Iterator[Field]:
    for i, tensor in enumerate(signature.inputs):
        key = USER_INPUT_KEY if tensor.role == "input" else CHECKPOINT_KEY
        yield Field(
            INPUT_TENSORS,
            BYTES,
            write_message(
                [
                    *_tensor(f"input{i}", tensor),
                    *sorted(
                        [
                            Field(TYPE, VARINT, TYPES[tensor.role]),
                            Field(key, BYTES, tensor.name.encode()),
                        ]
                    ),
                ]
            ),
        )
    for i, tensor in enumerate(signature.outputs):
        yield Field(OUTPUT_TENSORS, BYTES, write_message(_tensor(f"output{i}", tensor)))
    if hlo:
        yield Field(SERIALIZED_GRAPH_DEF, BYTES, hlo)
    positions = {t.name: i for i, t in enumerate(signature.inputs)}
    for i, tensor in enumerate(signature.outputs):
        if tensor.alias is not None:
            entry = [Field(MAP_KEY, VARINT, i), Field(MAP_VALUE, VARINT, positions[tensor.alias])]
            yield Field(OUTPUT_ALIASES_TO, BYTES, write_message(entry))


def _tensor(name: str, tensor: TensorSpec) -> list[Field]:
    return [
        Field(NAME, BYTES, name.encode()),
        packed(SHAPE, tensor.shape),
        Field(DATA_TYPE, VARINT, DATA_TYPES[tensor.dtype]),
    ]
