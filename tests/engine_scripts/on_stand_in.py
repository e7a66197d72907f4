"""What an engine answers on a stand-in of AWS's classes: CASES.json MODEL_YAML OUT.json ROUTE.

ROUTE: Executor or SPMDModel, or `emulate` for the same artifacts on XLA:CPU.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"


def main(cases_file: str, model_file: str, out_file: str, route: str) -> None:
    from neuron_stand_in import Device

    from nxbucket.serve import neuron_device, neuron_host
    from nxbucket.serve.engine_args import engine_args
    from nxbucket.serve.torch_neuron import TorchNeuron

    device = Device()
    neuron_host.neuron_devices = lambda: [Path("/dev/neuron0")]
    neuron_device.installed_packages = lambda: {"torch-neuronx": "2.0"}
    neuron_device.check_neff_file = lambda *_: []
    TorchNeuron.imported = classmethod(lambda cls, lnc: device.connected(route))
    arguments = engine_args(model_file, emulate=route == "emulate")
    assert arguments["additional_config"]["nxbucket"]["target"] == "trn2-lnc2"
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    cases = json.loads(Path(cases_file).read_text())
    params = [SamplingParams(temperature=0, **c["sampling"]) for c in cases]
    prompts = [{"prompt_token_ids": c["prompt_token_ids"]} for c in cases]
    outputs = [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]
    answers = [list(o.token_ids) for o in outputs]
    Path(out_file).write_text(json.dumps({"answers": answers, "events": device.events}))


main(*sys.argv[1:])
