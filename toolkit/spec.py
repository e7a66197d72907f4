"""The model file: `load_spec` turns model.yaml into a frozen DeploySpec, or says all that is wrong.

Defaults, for keys left out. They are our own and always passed on to vLLM, whose defaults differ
between its server and its `LLM` class:

    target                      cpu
    dtype                       the checkpoint's
    tensor_parallel_size        1
    max_model_len               as far as the model's positions and RoPE go, at most 4096
    max_num_seqs                8
    max_num_batched_tokens      2048
    block_size                  32
    num_gpu_blocks_override     max_num_seqs requests of max_model_len, and vLLM's null block
    enable_prefix_caching       true
    async_scheduling            on where the executor overlaps
    num_batched_tokens_buckets  powers of two from 128, closed by
                                min(max_num_batched_tokens, max_model_len)
    num_seqs_buckets            powers of two from 1, closed by max_num_seqs
    optlevel                    1
    auto_cast                   none
    lnc                         2 on trn2 and trn3, 1 on the other Neuron targets
    march                       the compiling host's level
    cache                       the user's cache folder

Keys follow vLLM and AWS, so a line can be pasted. `enable_chunked_prefill` may be given and must be
true of what we do anyway: it changes no program and is not part of the spec.
"""

from math import ceil
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from nxbucket.toolkit.architecture import Architecture
from nxbucket.toolkit.errors import SpecError
from nxbucket.toolkit.model_folder import CommitOf, ask_the_hub
from nxbucket.toolkit.spec_reader import read_values
from nxbucket.toolkit.yaml_source import Document, read_yaml

Dtype = Literal["float32", "bfloat16", "float16"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class NeuronConfig(_Frozen):
    num_batched_tokens_buckets: tuple[int, ...]
    """Prefill programs, in tokens per step: one is compiled for each entry. Ascends strictly and
    ends in min(max_num_batched_tokens, max_model_len)."""
    num_seqs_buckets: tuple[int, ...]
    """Decode programs, in sequences per step: one is compiled for each entry. Ascends strictly and
    ends in max_num_seqs."""
    kv_segment_size_buckets: tuple[int, ...] | None = None
    """One value: the KV cache is read this many tokens at a time, so that temporaries do not grow
    with max_model_len. A multiple of block_size, and on a Neuron target 512, 1024, 2048, 4096 or
    8192, as AWS's plugin takes it; null reads it in one piece."""
    decode_context_length_buckets: tuple[int, ...] | None = None
    """A second axis of the decode programs: context lengths in tokens, ascending, below
    max_model_len, which is always there. On target cpu multiples of block_size, on a Neuron target
    of 128, as AWS's plugin takes it; null compiles none."""

    @property
    def kv_segment_size(self) -> int | None:
        return None if self.kv_segment_size_buckets is None else self.kv_segment_size_buckets[0]


class CompilerOptions(_Frozen):
    optlevel: int = 1
    """neuronx-cc's optimisation level, 1 to 3."""
    auto_cast: str = "none"
    """What neuronx-cc may cast to a narrower type: none, matmult or all."""
    lnc: int | None = None
    """Physical cores per logical core: 1 or 2 on trn2 and trn3, 1 on the others."""
    flags: tuple[str, ...] = ()
    """More arguments for neuronx-cc, each in quotes. What has a key of its own is refused here."""
    march: str | None = None
    """The x86-64 level that target cpu compiles for: x86-64-v3 (AVX2) or x86-64-v4 (AVX-512). A
    server runs the best level that its lock has and its processor knows."""


class ArtifactLocations(_Frozen):
    cache: Path | None = None
    """The cache folder; a relative path starts at this file. NXBUCKET_CACHE_DIR wins over it."""
    remote: str | None = None
    """A store that hosts share, `s3://bucket/prefix` or a folder (a relative path starts at this
    file): asked for what the cache lacks, and what `push` and `compile --push` write to."""


class DeploySpec(_Frozen):
    path: Path
    model: str
    """The folder of a Hugging Face checkpoint (a relative path starts at this file), or a hub id,
    org/name. A folder of that name wins over a hub id. Required."""
    model_dir: Path
    """The folder with config.json. A hub id's is in the hub's cache; its weights come when a server
    asks for them."""
    revision: str | None = None
    """Of a hub id: a branch, a tag or a commit. `compile` writes the commit that it is into the
    lock, and a server fetches that commit, whatever the branch has become."""
    target: str
    """What the programs are compiled for: cpu, trn1, trn1n, inf2, trn2 or trn3."""
    dtype: Dtype
    """Of weights, KV cache and arithmetic: float32, bfloat16 or float16. Weights stored in another
    type are converted when they are loaded."""
    tensor_parallel_size: int
    """Ranks that share the model. Today: 1."""
    max_model_len: int
    """The longest request, prompt and answer together, in tokens."""
    max_num_seqs: int
    """The most requests that run at the same time."""
    max_num_batched_tokens: int
    """The most prompt tokens in one step; a longer prompt is read in chunks. At least
    max_num_seqs."""
    block_size: int
    """Tokens per block of the KV cache. On target cpu a multiple of 32. A Neuron target takes any;
    no size was tried on a device, and emulated servers were tried with 32 only."""
    num_gpu_blocks_override: int | None
    """Blocks of the KV cache, vLLM's null block among them. Part of every program's shape, so it is
    never taken from a host's free memory."""
    enable_prefix_caching: bool
    """Requests with the same beginning share its blocks of the KV cache."""
    async_scheduling: bool | None
    """The scheduler prepares a step while the one before it runs."""
    neuron_config: NeuronConfig
    compiler: CompilerOptions = CompilerOptions()
    artifacts: ArtifactLocations = ArtifactLocations()
    profile: str | None = None
    """A configuration to start from: a name of `nxbucket profiles ls`, or the path of a profile of
    your own, with a / or .yaml in it (a relative path starts at this file). Keys given here win
    over the profile's, in `neuron_config` and `compiler` one by one; see
    [profiles.md](profiles.md)."""
    serve: dict[str, Any] = {}
    """Further arguments of `vllm serve`, under their names with _ or -. What would change a
    program's shape is refused, with the key to edit."""
    architecture: Architecture
    model_commit: str | None = None
    """Of a hub id: the commit that `revision` is. None for a folder."""
    defaulted: frozenset[str] = frozenset()
    """Dotted keys left to their default."""
    from_profile: frozenset[str] = frozenset()
    """Dotted keys whose values are the profile's."""
    notes: tuple[str, ...] = ()
    """What a person should know and need not mend."""

    @property
    def effective_max_num_batched_tokens(self) -> int:
        """No step can be longer than a sequence."""
        return min(self.max_num_batched_tokens, self.max_model_len)

    @property
    def max_blocks_per_seq(self) -> int:
        return ceil(self.max_model_len / self.block_size)

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of every program, vLLM's null block among them."""
        if self.num_gpu_blocks_override is not None:
            return self.num_gpu_blocks_override
        return self.max_num_seqs * self.max_blocks_per_seq + 1

    def resolved(self) -> dict[str, Any]:
        """The effective configuration under model.yaml's own names, as JSON can hold it.

        The same on every host: a cache below the file's folder stays relative to it. What a profile
        gave is there as a value; its name is not.
        """
        own = {
            "path", "model_dir", "model_commit", "architecture", "defaulted", "notes", "profile",
            "from_profile",
        }  # fmt: skip
        config = self.model_dump(mode="json", exclude=own)
        config["num_gpu_blocks_override"] = self.num_kv_blocks
        if (cache := self.artifacts.cache) is not None:
            beside = cache.is_relative_to(self.path.parent)
            config["artifacts"]["cache"] = str(
                cache.relative_to(self.path.parent) if beside else cache
            )
        return config


def load_spec(path: Path, commit_of: CommitOf = ask_the_hub) -> DeploySpec:
    """Raises SpecError with every problem of model.yaml and config.json found in one run.

    A file that is not there or is a directory is a UsageError, one that may not be read an
    EnvironmentProblem, and so is a hub that cannot be reached. A server, whose lock names the
    commit of a hub id, gives `commit_of`, and then the hub decides nothing.
    """
    return spec_of(read_yaml(path.absolute()), commit_of)


def spec_of(document: Document, commit_of: CommitOf = ask_the_hub) -> DeploySpec:
    """Raises what `load_spec` does for a file that was read."""
    values, problems = read_values(document, commit_of)
    if problems:
        raise SpecError(document.placed(problems))
    return DeploySpec.model_validate(values)
