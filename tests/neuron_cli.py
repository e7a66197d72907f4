"""The real `nxbucket` command, with a lowering of milliseconds in front of the Neuron compiler."""

from nxbucket.compile import compiler
from nxbucket.toolkit import cli

if __name__ == "__main__":
    compiler.FACTORIES["neuron"] = "hlo_stand_in:NeuronCompilerOnly"
    cli.main()
