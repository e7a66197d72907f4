"""The Llama family: the decoder as it is. Biases of attention and MLP as config.json says."""

from nxbucket.compile.programs.decoder import DecoderProgram


class LlamaProgram(DecoderProgram):
    pass
