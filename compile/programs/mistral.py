"""The Mistral family: no biases, and every layer sees the last `sliding_window` tokens, if any."""

from nxbucket.compile.programs.decoder import DecoderProgram


class MistralProgram(DecoderProgram):
    pass
