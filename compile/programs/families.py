"""Which class writes a program's graph: one for each family."""

from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs.decoder import DecoderProgram
from nxbucket.compile.programs.llama import LlamaProgram
from nxbucket.compile.programs.mistral import MistralProgram
from nxbucket.compile.programs.qwen2 import Qwen2Program
from nxbucket.compile.programs.qwen3 import Qwen3Program
from nxbucket.toolkit.architecture import Family

PROGRAMS: dict[Family, type[DecoderProgram]] = {
    "llama": LlamaProgram,
    "mistral": MistralProgram,
    "qwen2": Qwen2Program,
    "qwen3": Qwen3Program,
}


def program_module(program: BucketProgram) -> DecoderProgram:
    """Ready to be exported or run eagerly."""
    return PROGRAMS[program.architecture.family](program).eval()
