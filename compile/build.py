"""From a model file to artifacts in the cache and a lock file: hit, pulled, or compiled."""

from dataclasses import dataclass
from pathlib import Path

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.canonical import digest_of
from nxbucket.compile.compiler import CompilerSpec
from nxbucket.compile.cost import compile_times
from nxbucket.compile.executor import MakeExecutor, PoolOptions, Work
from nxbucket.compile.explain import compile_command
from nxbucket.compile.fetch import fetch_locked
from nxbucket.compile.host_cpu import host_march
from nxbucket.compile.jobs import job_memory
from nxbucket.compile.key import key_inputs
from nxbucket.compile.leases import lease
from nxbucket.compile.lockfile import (
    Lock,
    changed_programs,
    check_lock,
    fault_of,
    lock_path,
    locked_program,
    make_lock,
    program_of,
    read_lock,
    write_lock,
)
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.outcome import Outcome, PlannedProgram, Reporter, Status
from nxbucket.compile.plan import plan_programs
from nxbucket.compile.pool import local_pool
from nxbucket.compile.remote import Damaged, Pulled, pull
from nxbucket.compile.sound import sound_lookup
from nxbucket.compile.store import Store
from nxbucket.compile.targets import HLO_TARGET, neuron_target
from nxbucket.compile.toolchain import Toolchain
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import CompileError, EnvironmentProblem, LockError
from nxbucket.toolkit.spec import DeploySpec


@dataclass(frozen=True)
class Plan:
    """`lacks`: why nothing can be compiled here; the toolchain is the lock's then."""

    toolchain: Toolchain
    programs: list[PlannedProgram]
    lacks: EnvironmentProblem | None = None


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, from 1: of the programs, those a CI job of that number compiles."""

    index: int
    count: int

    def __contains__(self, planned: PlannedProgram) -> bool:
        # By key and not by place: a list that grows by one entry moves no other program.
        return int(planned.key[:8], 16) % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class BuildReport:
    """`others`: programs of other shards, which this build did not look after."""

    toolchain: Toolchain
    outcomes: list[Outcome]
    lock_file: Path
    lock_written: bool
    changed: list[str]
    """Programs whose bytes are not those the previous lock named."""
    previous_commit: str | None = None
    """The commit of the hub id that the previous lock named."""
    others: tuple[str, ...] = ()

    @property
    def failed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status in ("failed", "unpushed", "skipped")]


def plan(spec: DeploySpec, cache: ArtifactCache, compiler: CompilerSpec) -> Plan:
    """Every program of `spec`, looked up. No torch.

    Raises EnvironmentProblem if there is neither the compiler nor a lock that says which it was.
    """
    lacks = None
    try:
        toolchain = compiler.create().toolchain()
    except EnvironmentProblem as err:
        locked = _locked_toolchain(spec, cache, compiler)
        if locked is None:
            raise
        toolchain, lacks = locked, err
    planned = []
    for program in plan_programs(spec):
        inputs = key_inputs(program, toolchain)
        key = digest_of(inputs)
        planned.append(PlannedProgram(program, inputs, key, sound_lookup(cache, key)))
    return Plan(toolchain, planned, lacks)


def _locked_toolchain(
    spec: DeploySpec, cache: ArtifactCache, compiler: CompilerSpec
) -> Toolchain | None:
    """What made the artifacts that the lock names for a Neuron target, with these very options."""
    lock = _previous_lock(lock_path(spec.path)) if compiler.is_neuron else None
    if lock is None or lock.spec.get("compiler") != spec.resolved()["compiler"]:
        return None
    target = neuron_target(spec.target, compiler.options["lnc"])
    locked = lock.targets.get(target)
    if locked is None:
        return None
    # The lock does not say what lowered the graphs, its entries do: all were planned together.
    for program in locked.programs:
        if isinstance(entry := cache.entry(program.key), Manifest):
            return Toolchain(target, locked.toolchain, entry.inputs.get("lowering", {}))
    return Toolchain(target, locked.toolchain)


def build(
    spec: DeploySpec,
    cache: ArtifactCache,
    compiler: CompilerSpec,
    reporter: Reporter,
    options: PoolOptions = PoolOptions(),  # noqa: B008  # frozen
    shard: Shard | None = None,
    make_executor: MakeExecutor = local_pool,
) -> BuildReport:
    """Compile what cache and remote lack, and write the lock once every program is there.

    A failure is not remembered: the next run tries again. KeyboardInterrupt stops the running
    compiles and leaves what is finished in the cache. Raises EnvironmentProblem if something is to
    be compiled, and there is nothing to do it with.
    """
    planned = plan(spec, cache, compiler)
    mine = [p for p in planned.programs if shard is None or p in shard]
    reporter.planned(mine)
    outcomes = {}
    for p in mine:
        # With `push`, a hit has work to do too.
        if isinstance(p.found, Hit) and not options.push:
            cache.mark_used(p.key)
            outcomes[p.name] = Outcome(p, "hit", 0.0, p.found.manifest)
            reporter.finished(outcomes[p.name])
    absent = not all(isinstance(p.found, Hit) for p in mine)
    if planned.lacks is not None and absent and options.remote is None:
        raise planned.lacks
    if missing := [p for p in mine if p.name not in outcomes]:
        cache.prepare()
        recorded, target = cache.manifests(), planned.toolchain.target
        memory = job_memory(recorded, target, compiler.memory_per_job_bytes)
        times = compile_times(recorded, target)
        work = Work(cache, compiler, reporter, options, missing, memory, times)
        with lease(cache.root, (p.key for p in planned.programs)):
            for outcome in make_executor(work).run():
                outcomes[outcome.name] = outcome
    others = [p for p in planned.programs if p not in mine]
    return _finish(spec, cache, planned.toolchain, [outcomes[p.name] for p in mine], others)


def gather(
    spec: DeploySpec,
    cache: ArtifactCache,
    compiler: CompilerSpec,
    reporter: Reporter,
    remote: Store | None,
) -> BuildReport:
    """What cache and remote hold, without compiling anything: for the lock after sharded compiles.

    Raises CompileError naming the programs that are nowhere.
    """
    planned = plan(spec, cache, compiler)
    reporter.planned(planned.programs)
    outcomes, faults = [], []
    for p in planned.programs:
        found = _gathered(cache, p, remote)
        if isinstance(found, str):
            faults.append(found)
            continue
        reporter.finished(found)
        outcomes.append(found)
    if faults:
        raise CompileError(
            f"not every program is there: {'; '.join(faults)}",
            hint=f"nxbucket compile {spec.path}",
        )
    return _finish(spec, cache, planned.toolchain, outcomes, [])


def _gathered(cache: ArtifactCache, planned: PlannedProgram, remote: Store | None) -> Outcome | str:
    if isinstance(planned.found, Hit):
        cache.mark_used(planned.key)
        return Outcome(planned, "hit", 0.0, planned.found.manifest)
    if remote is None:
        return f"{planned.name} is missing"
    cache.prepare()
    with cache.lock(planned.key):
        found = pull(remote, cache, planned.key)
    if isinstance(found, Pulled):
        return Outcome(planned, "pulled", 0.0, found.manifest)
    return f"{planned.name} is missing" + (
        f" ({found.reason})" if isinstance(found, Damaged) else ""
    )


def take_locked(
    spec: DeploySpec,
    cache: ArtifactCache,
    compiler: CompilerSpec,
    reporter: Reporter,
    remote: Store | None,
    *,
    emulate: bool,
) -> BuildReport:
    """The very bytes that the lock names for this target, from cache or remote; nothing else.

    Needs no compiler: the lock's keys count. Raises LockError for a lock of another model file, or
    of bytes that are to be had nowhere.
    """
    path = lock_path(spec.path)
    lock = read_lock(path, emulate=emulate)
    check_lock(lock, path, spec, emulate=emulate)
    name = _locked_target(lock, path, spec, compiler, emulate=emulate)
    target = lock.targets[name]
    found = [cache.lookup(p.key) for p in target.programs]
    faults = {
        p.name: fault
        for p, there in zip(target.programs, found, strict=True)
        if (fault := fault_of(lock, name, p, there)) is not None
    }
    if faults and remote is None:
        raise LockError(
            f"the cache {cache.root} does not hold what {path} names: {'; '.join(faults.values())}",
            hint=f"set artifacts.remote or give --remote; or {compile_command(spec.path)}, which "
            "may give other bytes and then changes the lock",
        )
    if faults and remote is not None:
        transfer = Transfer(say=reporter.noted)
        fetch_locked(lock, path, cache, remote, transfer, locked=True, only_target=name)
        found = [cache.lookup(p.key) for p in target.programs]
    outcomes = []
    for p, now in zip(target.programs, found, strict=True):
        if not isinstance(now, Hit):
            raise LockError(f"{p.name} was taken away by another process", hint="run it again")
        cache.mark_used(p.key)
        planned = PlannedProgram(program_of(lock, target, p), now.manifest.inputs, p.key, now)
        status: Status = "pulled" if p.name in faults else "hit"
        outcomes.append(Outcome(planned, status, 0.0, now.manifest))
    reporter.planned([o.planned for o in outcomes])
    for outcome in outcomes:
        reporter.finished(outcome)
    toolchain = Toolchain(name, target.toolchain)
    return BuildReport(toolchain, outcomes, path, lock_written=False, changed=[])


def _locked_target(
    lock: Lock, path: Path, spec: DeploySpec, compiler: CompilerSpec, *, emulate: bool
) -> str:
    """The target of `lock` that a compile of `spec` would be for; of several cpus the host's."""
    if emulate:
        wanted = [HLO_TARGET]
    elif compiler.is_neuron:
        wanted = [neuron_target(spec.target, compiler.options["lnc"])]
    else:
        named = [name for name in lock.targets if name.partition("-")[0] == "cpu"]
        wanted = [f"cpu-{host_march()}", *named] if len(named) > 1 else named
    for name in wanted:
        if name in lock.targets:
            return name
    raise LockError(
        f"{path} names nothing for target {spec.target}, only for {', '.join(lock.targets)}",
        hint=compile_command(spec.path, emulate=emulate),
    )


def _finish(
    spec: DeploySpec,
    cache: ArtifactCache,
    toolchain: Toolchain,
    outcomes: list[Outcome],
    others: list[PlannedProgram],
) -> BuildReport:
    """The lock, if every program of the plan is there now; those of other shards may be."""
    path = lock_path(spec.path)
    manifests = {o.name: o.manifest for o in outcomes if o.manifest and o.status != "unpushed"}
    for p in others:
        found = cache.lookup(p.key)
        if isinstance(found, Hit):
            manifests[p.name] = found.manifest
    absent = tuple(p.name for p in others if p.name not in manifests)
    planned = {p.name: p for p in (*(o.planned for o in outcomes), *others)}
    programs = [
        locked_program(planned[program.name].program, planned[program.name].key, manifest)
        for program in plan_programs(spec)
        if (manifest := manifests.get(program.name)) is not None
    ]
    if len(programs) < len(planned):
        return BuildReport(toolchain, outcomes, path, False, [], others=absent)
    previous = _previous_lock(path)
    lock = make_lock(spec, toolchain.target, toolchain.versions, programs, previous)
    return BuildReport(
        toolchain,
        outcomes,
        path,
        lock_written=write_lock(lock, path),
        changed=changed_programs(previous, lock, toolchain.target),
        previous_commit=previous.model_commit if previous is not None else None,
    )


def _previous_lock(path: Path) -> Lock | None:
    """None also for a lock that cannot be read: this run writes a good one."""
    try:
        return read_lock(path)
    except LockError:
        return None
