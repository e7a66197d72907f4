"""The Qwen3 family: each head's query and key is normalised before it is rotated."""

from torch import Tensor

from nxbucket.compile.programs.decoder import DecoderProgram


class Qwen3Program(DecoderProgram):
    def before_rotation(self, heads: Tensor, t: dict[str, Tensor], norm: str) -> Tensor:
        return self.norm(heads, t[norm])
