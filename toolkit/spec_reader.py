"""Reads the sections of a model file into the values of a DeploySpec, noting all that is wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxbucket.toolkit.architecture import ModelConfig, read_architecture
from nxbucket.toolkit.buckets import (
    check_bucket_list,
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
    show,
)
from nxbucket.toolkit.compiler_flags import as_list, check_flags, notes_on_flags
from nxbucket.toolkit.errors import EnvironmentProblem, ModelLookupError, Problem, SpecError
from nxbucket.toolkit.long_context import check_context_lengths, check_kv_segment_sizes
from nxbucket.toolkit.model_folder import CommitOf, FoundModel, ask_the_hub, find_model
from nxbucket.toolkit.profile_base import start_from_profile
from nxbucket.toolkit.refusals import (
    argument_name,
    is_vllm_key_that_holds,
    refused_key,
    refused_serve_argument,
    unknown_key_hint,
)
from nxbucket.toolkit.section import Section, integer_hint
from nxbucket.toolkit.store_address import is_folder
from nxbucket.toolkit.validate import Limits, check_limits
from nxbucket.toolkit.yaml_source import Document, MapNode, Node, ScalarNode

MAX_DEFAULT_MODEL_LEN = 4096
MARCH_LEVELS = ("x86-64-v3", "x86-64-v4")
"""What target cpu compiles for: AVX2, and AVX-512."""
DTYPES = ("float32", "bfloat16", "float16")
LengthRule = Callable[[list[object], str, Limits], list[Problem]]
TARGETS = ("cpu", "trn1", "trn1n", "inf2", "trn2", "trn3")
LNC_OF = {"trn1": (1,), "trn1n": (1,), "inf2": (1,), "trn2": (2, 1), "trn3": (2, 1)}
"""Physical cores that can make one logical core, our default first (AWS's own on trn2)."""

KEYS: dict[str, tuple[str, ...]] = {
    "": (
        "model", "revision", "target", "dtype", "tensor_parallel_size", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override",
        "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "neuron_config",
        "compiler", "artifacts", "profile", "serve",
    ),
    "neuron_config": (
        "num_batched_tokens_buckets", "num_seqs_buckets", "kv_segment_size_buckets",
        "decode_context_length_buckets",
    ),
    "compiler": ("optlevel", "auto_cast", "lnc", "flags", "march"),
    "artifacts": ("cache", "remote"),
}  # fmt: skip


def read_values(
    document: Document, commit_of: CommitOf = ask_the_hub
) -> tuple[dict[str, Any], list[Problem]]:
    """DeploySpec's fields, complete where no problem was found.

    Raises EnvironmentProblem if the hub is asked, cannot be reached, and nothing else is wrong.
    """
    problems = [*document.problems]
    root, base = start_from_profile(document, problems)
    top = Section(root, document.file, "", problems)
    reader = _SpecReader(top, document.file, problems, commit_of)
    values = reader.read()
    if base is not None:
        problems = base.told(problems)
        values["profile"] = base.name
        values["from_profile"] = base.keys - values["defaulted"]
    if (unreachable := reader.unreachable) is not None:
        if not problems:
            raise unreachable
        message, hint = unreachable.message, unreachable.hint or ""
        problems.append(Problem("hub-unreachable", message, hint, document.file, key="model"))
    return values, problems


class _SpecReader:
    """Reads section by section into one list of problems."""

    def __init__(
        self, top: Section, file: Path, problems: list[Problem], commit_of: CommitOf
    ) -> None:
        self._top = top
        self._file = file
        self._problems = problems
        self._commit_of = commit_of
        self._notes: list[str] = []
        self._found: FoundModel | None = None
        self.unreachable: EnvironmentProblem | None = None

    def read(self) -> dict[str, Any]:
        top = self._top
        self._check_keys(top, "")
        sections = {name: top.child(name) for name in ("neuron_config", "compiler", "artifacts")}
        for name, section in sections.items():
            self._check_keys(section, name)
        revision = top.string("revision", None)
        config = self._read_model(revision)
        positions = None if config is None else config.max_position_embeddings
        values: dict[str, Any] = {
            "path": self._file,
            "model": self._model,
            "revision": revision,
            "model_commit": None if self._found is None else self._found.commit,
            "model_dir": None if self._found is None else self._found.folder,
            "target": self._read_target(),
            "dtype": self._read_dtype(config),
            "tensor_parallel_size": self._read_tensor_parallel_size(),
            "max_model_len": top.integer(
                "max_model_len",
                None if positions is None else min(positions, MAX_DEFAULT_MODEL_LEN),
            ),
            "max_num_seqs": top.integer("max_num_seqs", 8),
            "max_num_batched_tokens": top.integer("max_num_batched_tokens", 2048),
            "block_size": top.integer("block_size", 32),
            "num_gpu_blocks_override": top.integer("num_gpu_blocks_override", None),
            "enable_prefix_caching": top.boolean("enable_prefix_caching", True),
            "async_scheduling": top.boolean("async_scheduling", None),
        }
        limits = Limits(
            file=self._file,
            defaulted=frozenset(top.defaulted),
            enable_chunked_prefill=top.boolean("enable_chunked_prefill", None),
            architecture=None if config is None else config.architecture,
            max_position_embeddings=positions,
            positions_reason="" if config is None else config.positions_reason,
            **{key: values[key] for key in Limits.__annotations__ if key in values},
        )
        self._problems += check_limits(limits)
        values["neuron_config"] = self._read_buckets(sections["neuron_config"], limits)
        values["compiler"] = self._read_compiler(sections["compiler"], values["target"])
        values["artifacts"] = self._read_artifacts(sections["artifacts"])
        values["serve"] = self._read_serve()
        self._note_limits(limits)
        values["architecture"] = limits.architecture
        if limits.architecture is not None and limits.max_model_len is not None:
            values["architecture"] = limits.architecture.within(limits.max_model_len)
        given = (top, *sections.values())
        values["defaulted"] = frozenset().union(*(s.defaulted for s in given))
        values["defaulted"] -= {"enable_chunked_prefill"}
        values["notes"] = tuple(self._notes)
        return values

    def _check_keys(self, section: Section, name: str) -> None:
        for key in section:
            if key in KEYS[name]:
                continue
            value = None
            if isinstance(node := section.node(key), ScalarNode):
                value = node.value
            if not name and is_vllm_key_that_holds(key, value) and node is not None:
                self._notes.append(f"{key}: holds here anyway; the line changes nothing")
            elif not name and (refusal := refused_key(key, value)):
                section.report_key(key, "cannot-hold", *refusal)
            else:
                message = f"unknown key {show(section.dotted(key))}"
                section.report_key(key, "unknown-key", message, unknown_key_hint(key, name, KEYS))

    def _read_model(self, revision: str | None) -> ModelConfig | None:
        self._model = model = self._top.string("model", None)
        if model is None:
            if "model" not in self._top or "model" in self._top.defaulted:
                message = "model is missing: the folder of a Hugging Face checkpoint, or a hub id"
                hint = "add `model: <folder>` or `model: org/name`"
                problem = Problem("model-missing", message, hint, self._file, key="model")
                self._problems.append(problem)
            return None
        try:
            self._found = find_model(model, revision, self._file.parent, self._commit_of)
            config = read_architecture(self._found.folder)
        except ModelLookupError as err:
            self._top.report(err.key, err.problem_code, err.message, err.hint or "")
            return None
        except EnvironmentProblem as err:
            self.unreachable = err
            return None
        except SpecError as err:
            self._problems += err.problems
            return None
        if revision is not None and self._found.commit is None:
            self._notes.append("revision: model is a folder, so the line changes nothing")
        self._notes += config.notes
        return config

    def _read_target(self) -> str | None:
        return self._top.choice("target", TARGETS, "cpu")

    def _read_dtype(self, config: ModelConfig | None) -> str | None:
        top = self._top
        if "dtype" in top:
            dtype = top.choice("dtype", DTYPES, None)
            if "dtype" not in top.defaulted:
                return dtype
        top.defaulted.add("dtype")
        if config is None or config.dtype in DTYPES:
            return None if config is None else config.dtype
        named = "names no dtype" if config.dtype is None else f"is {show(config.dtype)}"
        problem = Problem(
            "dtype-unknown",
            f"the checkpoint {named}; it must be one of {', '.join(DTYPES)}",
            "set dtype in model.yaml",
            self._file,
            key="dtype",
        )
        self._problems.append(problem)
        return None

    def _read_tensor_parallel_size(self) -> int | None:
        size = self._top.integer("tensor_parallel_size", 1)
        if size is not None and size > 1:
            message = f"not yet: tensor_parallel_size {size}"
            hint = "one rank compiles and serves today: tensor_parallel_size: 1"
            self._top.report("tensor_parallel_size", "not-yet", message, hint)
        return size

    def _read_buckets(self, section: Section, limits: Limits) -> dict[str, Any]:
        budget = limits.effective_max_num_batched_tokens
        tokens_rule = (
            f"min of {limits.named('max_num_batched_tokens')}, and {limits.named('max_model_len')}"
        )
        tokens = self._read_list(section, "num_batched_tokens_buckets", budget, tokens_rule, limits)
        seqs_rule = limits.named("max_num_seqs")
        seqs = self._read_list(section, "num_seqs_buckets", limits.max_num_seqs, seqs_rule, limits)
        if tokens is None and budget is not None:
            tokens = get_default_num_batched_tokens_buckets(budget)
        if seqs is None and limits.max_num_seqs is not None:
            seqs = get_default_num_seqs_buckets(limits.max_num_seqs)
        return {
            "num_batched_tokens_buckets": tuple(tokens or ()),
            "num_seqs_buckets": tuple(seqs or ()),
            "kv_segment_size_buckets": self._read_lengths(
                section, "kv_segment_size_buckets", check_kv_segment_sizes, limits
            ),
            "decode_context_length_buckets": self._read_lengths(
                section, "decode_context_length_buckets", check_context_lengths, limits
            ),
        }

    def _read_lengths(
        self, section: Section, key: str, check: LengthRule, limits: Limits
    ) -> tuple[int, ...] | None:
        """One of the two lists for long contexts; None, their default, leaves them unused."""
        nodes = section.items(key, "list of integers")
        if nodes is None:
            return None
        values = _item_values(nodes)
        dotted = section.dotted(key)
        self._note_problems(check(values, dotted, limits), dotted, nodes)
        return tuple(value for value in values if isinstance(value, int))

    def _read_list(
        self, section: Section, key: str, last: int | None, last_rule: str, limits: Limits
    ) -> list[int] | None:
        nodes = section.items(key, "list of integers")
        if nodes is None:
            return None
        values = _item_values(nodes)
        dotted = section.dotted(key)
        problems = check_bucket_list(
            values,
            file=self._file,
            key=dotted,
            last=last,
            last_rule=last_rule,
            last_hint=_last_hint(key, values, last, limits),
        )
        self._note_problems(problems, dotted, nodes)
        return [value for value in values if isinstance(value, int)]

    def _note_problems(self, problems: list[Problem], dotted: str, nodes: list[Node]) -> None:
        """An item that is no integer gets the hint its spelling allows."""
        for problem in problems:
            if problem.code == "bucket-not-integer" and problem.key is not None:
                index = int(problem.key[len(dotted) + 1 : -1])
                self._problems.append(replace(problem, hint=integer_hint(nodes[index])))
            else:
                self._problems.append(problem)

    def _read_compiler(self, section: Section, target: str | None) -> dict[str, Any]:
        flags = []
        given = section.node("flags")
        text = given.text if isinstance(given, ScalarNode) else "--model-type=transformer"
        hint = f"write flags: {as_list(text)}"
        for index, node in enumerate(section.items("flags", "list of strings", hint) or ()):
            if isinstance(node, ScalarNode) and node.kind == "string" and node.text.isprintable():
                flags.append(node.text)
            else:
                message = f"{section.dotted(f'flags[{index}]')} is no string"
                section.report(f"flags[{index}]", "wrong-type", message, "put it in quotes")
        lnc = section.integer("lnc", None, maximum=2)
        values = {
            "optlevel": section.integer("optlevel", 1, maximum=3),
            "auto_cast": section.choice("auto_cast", ("none", "matmult", "all"), "none"),
            "lnc": lnc,
            "flags": tuple(flags),
        }
        for key, without_effect in (("optlevel", 1), ("auto_cast", "none"), ("lnc", None)):
            if target == "cpu" and values[key] not in (without_effect, None):
                self._refuse_neuron_option(section, key)
        if target == "cpu" and flags:
            self._refuse_neuron_option(section, "flags")
        march = section.choice("march", MARCH_LEVELS, None)
        if target not in (None, "cpu"):
            if march is not None:
                message = f"{section.dotted('march')} is an option of target cpu"
                hint = f"delete the line: target {target} has lnc, optlevel, auto_cast and flags"
                section.report("march", "no-effect", message, hint)
            values["lnc"] = self._check_lnc(section, str(target), lnc)
            for problem in check_flags(flags):
                key = f"flags[{problem.index}]"
                section.report(key, "compiler-flag", problem.message, problem.hint)
            self._notes += notes_on_flags(flags, str(target))
        return {**values, "march": march}

    @staticmethod
    def _check_lnc(section: Section, target: str, lnc: int | None) -> int | None:
        """Always a number for a Neuron target: the compiler is never left to its own default."""
        allowed = LNC_OF[target]
        if lnc is not None and lnc not in allowed:
            message = (
                f"{section.dotted('lnc')} is {lnc}; target {target} has no logical cores of {lnc}"
            )
            hint = f"lnc: {allowed[0]}, or delete the line (neuronx-cc calls this NCC_EARG001)"
            section.report("lnc", "lnc", message, hint)
        return lnc or allowed[0]

    @staticmethod
    def _refuse_neuron_option(section: Section, key: str) -> None:
        message = (
            f"{section.dotted(key)} is an option of neuronx-cc, and target cpu does not use it"
        )
        section.report(key, "no-effect", message, "delete the line; compiler.march is the cpu's")

    def _read_artifacts(self, section: Section) -> dict[str, Any]:
        cache, remote = section.string("cache", None), section.string("remote", None)
        if remote is not None and not remote.startswith("s3://"):
            mend = "s3://bucket/prefix, or a folder"
            said = f"{section.dotted('remote')} is {show(remote)}"
            if not is_folder(remote):
                section.report("remote", "remote", f"{said}: no store has such an address", mend)
            else:
                try:
                    remote = str(self._file.parent / Path(remote).expanduser())
                except RuntimeError:
                    section.report("remote", "remote", f"{said}: there is no such home", mend)
        return {"cache": None if cache is None else self._file.parent / cache, "remote": remote}

    def _read_serve(self) -> dict[str, Any]:
        section = self._top.child("serve")
        arguments: dict[str, Any] = {}
        for key in section:
            name = argument_name(key)
            value = section.plain(key)
            if refusal := refused_serve_argument(key, value):
                section.report_key(key, "serve-argument", *refusal)
            elif name in arguments:
                message = f"serve.{show(key)} is given twice, with - and with _"
                section.report_key(key, "duplicate-key", message, "keep one of them")
            else:
                arguments[name] = value
        return arguments

    def _note_limits(self, limits: Limits) -> None:
        budget, length = limits.max_num_batched_tokens, limits.max_model_len
        if budget is not None and length is not None and budget > length:
            self._notes.append(
                f"the effective token budget is {length}: min of "
                f"{limits.named('max_num_batched_tokens')}, and {limits.named('max_model_len')}. "
                f"The last prefill bucket is held to {length}, not to max_num_batched_tokens alone "
                "(AWS documents both rules)"
            )
        if limits.enable_chunked_prefill is False:
            self._notes.append(
                "enable_chunked_prefill: false holds because every prompt fits one step; "
                "chunked prefill stays on"
            )


def _item_values(nodes: list[Node]) -> list[object]:
    return [
        int(n.text) if isinstance(n, ScalarNode) and n.kind == "integer" else _for_message(n)
        for n in nodes
    ]


def _for_message(node: Node) -> object:
    """An item that is no integer, as the value an error shows."""
    if isinstance(node, ScalarNode):
        return node.value
    return {} if isinstance(node, MapNode) else []


def _last_hint(key: str, values: list[object], last: int | None, limits: Limits) -> str | None:
    """Where the list fits a limit that was left out, or AWS's other rule, that is the mend."""
    sizes = [v for v in values if isinstance(v, int)]
    if last is None or not sizes:
        return None
    largest = max(sizes)
    if key == "num_seqs_buckets":
        return f"end the list in {last}, or set max_num_seqs: {largest}"
    if largest == limits.max_num_batched_tokens and largest > last:
        return (
            f"end the list in {last}: the rule is min(max_num_batched_tokens, max_model_len). "
            "AWS's configuration page reads it as max_num_batched_tokens alone, which this list "
            "keeps, but no step is longer than max_model_len"
        )
    if largest > last and largest <= (limits.max_model_len or 0):
        return f"end the list in {last}, or set max_num_batched_tokens: {largest}"
    return f"end the list in {last}"
