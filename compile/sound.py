"""Whether a Neuron artifact of the cache is what its entry says, and not only the bytes it names.

An entry's blobs are no part of its key. For a program of another chip, slipped under an entry by
hand, every digest is right; its NEFF's own header is not.
"""

from nxbucket.compile.cache import ArtifactCache, Corrupt, Hit, Lookup
from nxbucket.compile.manifest import Manifest, blob_of
from nxbucket.compile.targets import parse_neuron_target


def sound_lookup(cache: ArtifactCache, key: str) -> Lookup:
    """`cache.lookup`, with the NEFF read too, if it is one."""
    found = cache.lookup(key)
    if not isinstance(found, Hit):
        return found
    fault = neff_fault(cache, found.manifest)
    return Corrupt(fault) if fault else found


def neff_fault(cache: ArtifactCache, manifest: Manifest) -> str | None:
    """What is wrong with the NEFF of a manifest whose blobs are in the cache, if it has one."""
    target = parse_neuron_target(manifest.target)
    neff = blob_of(manifest.blobs, "program")
    if target is None or neff is None:
        return None
    from nxbucket.compile.neuron.neff import check_neff_file

    path = cache.blob_path(neff.digest)
    faults = check_neff_file(path, *target, manifest.signature)
    return f"{path}: the NEFF {'; '.join(faults)}" if faults else None
