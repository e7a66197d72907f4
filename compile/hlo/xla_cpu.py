"""Run the exact bytes of an HloModuleProto on this host's processor, with XLA's own CPU compiler.

What is run is the module that a Neuron compiler would be given, read back by XLA's importer: no
program is traced again. The APIs are private names of jaxlib, which is pinned for that.
"""

from collections.abc import Sequence

# isort: off
from nxbucket.compile.hlo import jax_setup  # noqa: F401  # before jax
# isort: on

import jax
from jaxlib import _hlo, _jax  # type: ignore[attr-defined]


class XlaCpuProgram:
    """Compiled once, in seconds; called with the module's parameters in order.

    A parameter that the module aliases to an output is given up: its buffer becomes the output.
    `quick`: LLVM does not optimise, which halves the compile; the results are those of the same
    operations.
    """

    def __init__(self, module: bytes, *, quick: bool = False) -> None:
        (self.device,) = jax.local_devices(backend="cpu")[:1]
        devices = _jax.DeviceList((self.device,))
        imported = _jax.mlir.hlo_to_stablehlo(module)
        options = _jax.CompileOptions()
        if quick:
            options.executable_build_options.debug_options.xla_backend_optimization_level = 0
        self._executable = self.device.client.compile_and_load(imported, devices, options)

    def __call__(self, parameters: Sequence[jax.Array]) -> list[jax.Array]:
        """The module's outputs, in order."""
        results = self._executable.execute_sharded(list(parameters))
        return [shards[0] for shards in results.disassemble_into_single_device_arrays()]

    def optimised_text(self) -> str:
        """What XLA made of the module before it wrote machine code."""
        (module,) = self._executable.hlo_modules()
        return str(module.to_string(_hlo.HloPrintOptions.canonical()))
