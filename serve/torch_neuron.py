"""torch.classes.neuron and torch.ops.neuron behind one class: all we ask of AWS's packages.

NOT VERIFIED on a device. Each call is as public code makes it:

- `SPMDModel(neff, metaneff, local_ranks_size, world_size)`, `.initialize(states, weights,
  start_rank)`, `.forward(inputs)`; `_parallel_load(checkpoints)`; buffers on
  `privateuseone:<rank>`: NxD, aws-neuron/neuronx-distributed fbac349b, trace/spmd.py and
  trace/nxd_model/nxd_model.py.
- `Executor(neff_path, start_nc, global_rank, world_size)`, `.execute(inputs, outputs)`: a public
  copy of AWS's vllm_neuron, compile/backend.py. An output that is updated in place is the input's
  tensor itself, put into the list of outputs. Its tensors are on a device that calls itself
  `neuron`; `privateuseone` is torch's own word for such a device, whatever it was renamed to.

Which of the two: `Executor` is what AWS's plugin of 2026 uses, on trn2 and trn3 only; NxD's
`SPMDModel` serves trn1, trn1n, inf2 and trn2. So trn3 takes Executor, trn1, trn1n and inf2 take
SPMDModel, and trn2 takes Executor where it is registered, else SPMDModel.
"""

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nxbucket.serve.neuron_host import LNC_VARIABLE
from nxbucket.toolkit.errors import EnvironmentProblem

Route = Literal["Executor", "SPMDModel"]

ROUTES: dict[str, tuple[Route, ...]] = {
    "trn1": ("SPMDModel",),
    "trn1n": ("SPMDModel",),
    "inf2": ("SPMDModel",),
    "trn2": ("Executor", "SPMDModel"),
    "trn3": ("Executor",),
}
"""By target, the first that is registered."""

MODULES = ("torch_neuronx", "libtorch_neuronx_lite")
"""What registers the classes when it is imported; the second is the plugin's of 2026."""

RANK, NUM_RANKS = 0, 1


class TorchNeuron:
    """The one place a stand-in replaces. `device`: where weights and KV cache are."""

    def __init__(self, classes: Any, ops: Any, device: str = f"privateuseone:{RANK}") -> None:
        self._classes = classes
        self._ops = ops
        self._device = torch.device(device)

    @classmethod
    def imported(cls, lnc: int) -> "TorchNeuron":
        """Import what registers the classes. Raises EnvironmentProblem.

        The runtime starts with it and reads its variables then; those that are not set are set to
        what the programs are for: one rank, on logical cores of `lnc`.
        """
        if not os.environ.get(LNC_VARIABLE):
            os.environ[LNC_VARIABLE] = str(lnc)
        if "NEURON_RT_VISIBLE_CORES" not in os.environ:
            os.environ.setdefault("NEURON_RT_NUM_CORES", str(NUM_RANKS))
        found = [module for module in MODULES if importlib.util.find_spec(module) is not None]
        for module in found:
            try:
                importlib.import_module(module)
            except (ImportError, OSError, RuntimeError) as err:
                raise EnvironmentProblem(
                    f"{module} does not import: {str(err).partition(chr(10))[0]}",
                    hint="install the release of it that is made for this torch "
                    f"({torch.__version__})",
                ) from err
        return cls(torch.classes.neuron, torch.ops.neuron)

    def route(self, target: str) -> Route:
        """Raises EnvironmentProblem if nothing that is registered runs `target`."""
        usable = ROUTES.get(target, ())
        for route in usable:
            if self._is_registered(route):
                return route
        raise EnvironmentProblem(
            f"{target} is served through torch.classes.neuron.{' or '.join(usable) or '?'}, and "
            f"{' and '.join(MODULES)} register none",
            hint="install the torch-neuronx that is made for this chip and this torch "
            f"({torch.__version__})",
        )

    def _is_registered(self, name: str) -> bool:
        try:
            getattr(self._classes, name)
        except (AttributeError, RuntimeError):  # torch: "Class neuron.X not registered!"
            return False
        return True

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def upload(self, checkpoint: Mapping[str, Tensor], route: Route) -> dict[str, Tensor]:
        """All weights to the device: as NxD does it for its class, one by one for the plugin's."""
        if route == "SPMDModel":
            (loaded,) = self._ops._parallel_load([dict(checkpoint)])
            return dict(loaded)
        return {name: self.to_device(tensor) for name, tensor in checkpoint.items()}

    def executor(self, neff: Path) -> Any:
        return self._classes.Executor(str(neff), 0, RANK, NUM_RANKS)

    def spmd_model(self, neff: bytes, metaneff: bytes) -> Any:
        return self._classes.SPMDModel(neff, metaneff, NUM_RANKS, NUM_RANKS)

    def initialize(
        self, model: Any, states: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> None:
        model.initialize([dict(states)], [dict(weights)], RANK)
