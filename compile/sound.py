"""Whether a Neuron artifact of the cache is what its entry says, and not only the bytes it names.

An entry's blobs are no part of its key. For a program of another chip, slipped under an entry by
hand, every digest is right; its NEFF's own header is not.
"""

from nxbucket.compile.cache import ArtifactCache, Corrupt, Hit, Lookup
from nxbucket.compile.manifest import blob_of
from nxbucket.compile.targets import parse_neuron_target


def sound_lookup(cache: ArtifactCache, key: str) -> Lookup:
    """`cache.lookup`, with the NEFF read too, if it is one."""
    found = cache.lookup(key)
    if not isinstance(found, Hit):
        return found
    target = parse_neuron_target(found.manifest.target)
    neff = blob_of(found.manifest.blobs, "program")
    if target is None or neff is None:
        return found
    from nxbucket.compile.neuron.neff import check_neff_file

    path = cache.blob_path(neff.digest)
    faults = check_neff_file(path, *target, found.manifest.signature)
    return Corrupt(f"{path}: the NEFF {'; '.join(faults)}") if faults else found
