"""The Qwen2 family: q, k and v have a bias and o has none; the later layers may have a window."""

from nxbucket.compile.programs.decoder import DecoderProgram


class Qwen2Program(DecoderProgram):
    pass
