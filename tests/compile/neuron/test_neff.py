"""Reading NEFFs: good ones, those of another chip, and those that somebody made to do harm."""

import gzip
import hashlib
import io
import json
import resource
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuronx_cc_stand_in import make_neff, pack, with_header
from null_compiler import a_program

from nxbucket.compile.neuron import neff_archive
from nxbucket.compile.neuron.neff import (
    Neff,
    check_neff_file,
    looks_like_neff,
    read_neff,
    targets_of,
)
from nxbucket.compile.neuron.neff_archive import MalformedNeff
from nxbucket.compile.program import ITEM_BYTES

SIGNATURE = a_program("decode", 2).signature
INPUTS = [t.num_elements * ITEM_BYTES[t.dtype] for t in SIGNATURE.inputs]
OUTPUTS = [t.num_elements * ITEM_BYTES[t.dtype] for t in SIGNATURE.outputs]
RETURNED = OUTPUTS[:1]
GOOD = make_neff(INPUTS, OUTPUTS, lnc=2)
MANY_TIMES = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read(folder: Path, payload: bytes) -> Neff:
    file = folder / "program.neff"
    file.write_bytes(payload)
    return read_neff(file)


def faults(folder: Path, payload: bytes, target: str = "trn2", lnc: int = 2) -> list[str]:
    file = folder / "program.neff"
    file.write_bytes(payload)
    return check_neff_file(file, target, lnc, SIGNATURE)


@pytest.mark.parametrize(("layout", "scheme"), [("gzip-md5", "md5"), ("plain-sha256", "sha256")])
def test_a_good_neff_says_what_it_is(tmp_path: Path, layout: str, scheme: str) -> None:
    neff = read(tmp_path, make_neff(INPUTS, OUTPUTS, lnc=2, layout=layout))
    assert (neff.digest, neff.digest_scheme) == ("ok", scheme)
    assert neff.compressed == (layout == "gzip-md5")
    assert (neff.target, neff.lnc, neff.graphs) == ("cayman", 2, ("sg00", "sg01"))
    assert [t.size_bytes for t in neff.tensors if t.graph == "sg00"] == INPUTS + OUTPUTS
    assert neff.header.build_version == "2.27.5334.0%kaena@f702b353"
    assert (neff.header.major, neff.header.name, neff.notes) == (2, "program", ())
    assert ("sg00/pe.bin", 256) in neff.members
    json.dumps(neff.as_json())
    assert faults(tmp_path, make_neff(INPUTS, OUTPUTS, lnc=2, layout=layout)) == []


@pytest.mark.parametrize(
    ("kelf", "target", "fits"),
    [
        ("cayman", "trn2", True),
        ("v3", "trn2", True),
        ("sunda", "trn2", False),
        ("sunda", "trn1", True),
        ("v2", "inf2", True),
        ("", "trn1n", True),
        ("", "trn2", False),
        ("mariana", "trn3", True),
        ("v4", "trn3", True),
        ("v4", "trn2", False),
        ("*", "trn3", True),
        ("v9", "trn3", False),
    ],
)
def test_a_neff_of_another_chip_is_a_fault(
    tmp_path: Path, kelf: str, target: str, fits: bool
) -> None:
    neff = make_neff(INPUTS, OUTPUTS, target=kelf, lnc=1)
    assert (faults(tmp_path, neff, target, 1) == []) == fits
    if kelf not in ("*", "v9"):
        assert (target in targets_of(kelf)) == fits


def test_a_logical_core_is_that_of_the_header_and_of_the_graphs(tmp_path: Path) -> None:
    one = make_neff(INPUTS, OUTPUTS, lnc=1)
    assert faults(tmp_path, one) == [
        "is for logical cores of 1, not of 2 (lnc)",
        "has 1 graphs; a logical core of 2 takes 2",
    ]
    # Not recorded: the graphs decide.
    assert faults(tmp_path, make_neff(INPUTS, OUTPUTS, lnc=0, graphs=2)) == []
    assert len(faults(tmp_path, make_neff(INPUTS, OUTPUTS, lnc=0, graphs=1))) == 1


@pytest.mark.parametrize(
    ("inputs", "outputs", "fault"),
    [
        (INPUTS, RETURNED, None),
        (INPUTS[::-1], OUTPUTS[::-1], None),
        # Nothing is listed, nothing is compared.
        ([], [], None),
        (INPUTS[1:], OUTPUTS, "has other inputs than the program: it lacks 1 of 8 bytes"),
        ([*INPUTS, 12], OUTPUTS, "has other inputs than the program: it has 1 of 12 bytes"),
        (INPUTS, OUTPUTS[1:], "has other outputs than the program: it lacks 1 of 768 bytes"),
        (INPUTS, [*OUTPUTS, 12], "has other outputs than the program: it has 1 of 12 bytes"),
    ],
)
def test_sizes_are_compared_as_a_bag(
    tmp_path: Path, inputs: list[int], outputs: list[int], fault: str | None
) -> None:
    found = faults(tmp_path, make_neff(inputs, outputs, lnc=2))
    assert found == ([] if fault is None else [fault])


def test_one_graph_that_lists_every_tensor_is_enough(tmp_path: Path) -> None:
    def definition(names: str, inputs: list[int]) -> bytes:
        sizes = [*(("input", n) for n in inputs), *(("output", n) for n in RETURNED)]
        var = {f"{names}{i}": {"type": k, "size": n} for i, (k, n) in enumerate(sizes)}
        return json.dumps({"var": var}).encode()

    for second in (INPUTS, [4]):
        files = {"kelf-0.json": b'{"target": "v3"}', "sg00/def.json": definition("a", INPUTS)}
        neff = pack(files | {"sg01/def.json": definition("b", second)}, lnc=2)
        assert faults(tmp_path, neff) == []


def test_a_digest_of_an_unknown_scheme_is_not_checked_and_says_so(tmp_path: Path) -> None:
    neff = bytearray(GOOD)
    neff[0] = 7
    neff[172:204] = b"\1" * 32
    found = read(tmp_path, bytes(neff))
    assert (found.digest, found.digest_scheme) == ("not checked", None)
    assert found.notes == ("digest not checked: pkg_version 7 is unknown here",)


def test_features_of_a_newer_runtime_and_bytes_behind_the_archive_are_noted(tmp_path: Path) -> None:
    neff = bytearray(GOOD)
    neff[544:552] = struct.pack("<Q", 1 << 40)
    first, second = read(tmp_path, bytes(neff) + b"xyz").notes
    assert first == "3 bytes follow the archive"
    assert "feature bits 0x10000000000" in second


@MANY_TIMES
@given(st.integers(0, len(GOOD) - 1))
def test_a_neff_cut_anywhere_is_refused(tmp_path: Path, size: int) -> None:
    assert len(faults(tmp_path, GOOD[:size])) == 1


@MANY_TIMES
@given(st.integers(0, 1023), st.integers(1, 255))
def test_a_header_with_any_other_byte_is_read_or_refused_and_its_digest_holds(
    tmp_path: Path, at: int, change: int
) -> None:
    neff = bytearray(GOOD)
    neff[at] ^= change
    try:
        found = read(tmp_path, bytes(neff))
    except MalformedNeff:
        return
    # The digest itself, or the length of what it is of.
    if 172 <= at < 188 or 16 <= at < 24:
        assert found.digest == "differs"
        assert "is damaged" in faults(tmp_path, bytes(neff))[0]
    else:
        assert found.digest == "ok"


@MANY_TIMES
@given(st.integers(1024, len(GOOD) - 1), st.integers(1, 255))
def test_an_archive_with_any_other_byte_is_refused(tmp_path: Path, at: int, change: int) -> None:
    neff = bytearray(GOOD)
    neff[at] ^= change
    assert "is damaged" in faults(tmp_path, bytes(neff))[0]


@MANY_TIMES
@given(st.binary(max_size=3000))
def test_noise_with_a_good_header_is_refused_without_a_traceback(
    tmp_path: Path, archive: bytes
) -> None:
    assert len(faults(tmp_path, with_header(archive, layout="plain-sha256"))) >= 1
    assert len(faults(tmp_path, with_header(archive))) >= 1


@MANY_TIMES
@given(st.data())
def test_a_tar_with_any_other_byte_and_a_right_digest_is_no_traceback(
    tmp_path: Path, data: st.DataObject
) -> None:
    archive = bytearray(gzip.decompress(GOOD[1024:]))
    for _ in range(data.draw(st.integers(1, 4))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    faults(tmp_path, with_header(bytes(archive), lnc=2))


def tar_of(*members: tuple[str, dict[str, Any], bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, fields, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in fields.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


KELF: tuple[str, dict[str, Any], bytes] = ("kelf-0.json", {}, b'{"target": "v3"}')


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (tar_of(("../kelf-0.json", {}, b"{}")), "a member named '../kelf-0.json'"),
        (tar_of(KELF, ("a/../../b", {}, b"")), "a member named 'a/../../b'"),
        (tar_of(KELF, ("/etc/passwd", {}, b"")), "a member named '/etc/passwd'"),
        (tar_of(KELF, ("x\x1b[2J", {}, b"")), "a member named"),
        (tar_of(KELF, ("l", {"type": tarfile.SYMTYPE, "linkname": "/"}, b"")), "a symbolic link"),
        (tar_of(KELF, ("l", {"type": tarfile.LNKTYPE, "linkname": "x"}, b"")), "a hard link"),
        (tar_of(KELF, ("d", {"type": tarfile.CHRTYPE}, b"")), "is no plain file"),
        (tar_of(KELF, KELF), "holds 'kelf-0.json' twice"),
        (tar_of(KELF, ("kelf-a.json", {}, b"{}")), "holds kelf-0.json and kelf-a.json"),
        (tar_of(("sg00/def.json", {}, b"{}")), "has no kelf-*.json"),
        (tar_of(("kelf-0.json", {}, b"[]")), "is no JSON object"),
        (tar_of(("kelf-0.json", {}, b'{"target": 3}')), "`target` is no name"),
        (tar_of(("kelf-0.json", {}, b"\xff")), "is no JSON"),
        (tar_of(("kelf-0.json", {}, b"[" * 100_000)), "is no JSON"),
        (tar_of(("kelf-0.json", {}, b'{"a": ' + b"9" * 5000 + b"}")), "is no JSON"),
        (tar_of(KELF, ("sg00/def.json", {}, b'{"var": []}')), "`var` is no object"),
        (tar_of(KELF, *[(f"sg{i}/def.json", {}, b"{}") for i in range(20)]), "more than 16 graphs"),
        (b"", "has no kelf"),
        (tar_of(KELF)[:700], "is cut off"),
        (b"x" * 4096, "is no tar, or damaged"),
    ],
)
def test_a_hostile_archive_is_refused(tmp_path: Path, archive: bytes, reason: str) -> None:
    with pytest.raises(MalformedNeff) as caught:
        read(tmp_path, with_header(archive))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "size", ["-1", "1e999", "1.5", "true", '"4"', "null", "1" + "0" * 40, "{}", "[]"]
)
def test_a_size_that_is_no_number_of_bytes_is_refused(tmp_path: Path, size: str) -> None:
    definition = f'{{"var": {{"a": {{"type": "input", "size": {size}}}}}}}'.encode()
    with pytest.raises(MalformedNeff, match="has no size in bytes"):
        read(tmp_path, pack({"kelf-0.json": b"{}", "sg00/def.json": definition}))


def test_a_tensor_s_name_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    definition = b'{"var": {"\\ud800\\u001b[2J": {"type": "input", "size": 4}}}'
    neff = read(tmp_path, pack({"kelf-0.json": b"{}", "sg00/def.json": definition}))
    assert [t.name for t in neff.tensors] == ["??[2J"]


def test_long_names_folders_and_extended_headers_are_read(tmp_path: Path) -> None:
    long = "sg00/" + "n" * 300 + ".bin"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
            folder = tarfile.TarInfo("./sg00")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            name = "d" * 90 + "/" + "n" * 90 if form == tarfile.USTAR_FORMAT else long
            for path, content in (("./kelf-0.json", b'{"target": "*"}'), (name, b"12345")):
                member = tarfile.TarInfo(path)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        neff = read(tmp_path, with_header(buffer.getvalue()))
        assert neff.members == (("kelf-0.json", 15), (name, 5))


def test_a_bomb_is_given_up_early_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neff_archive, "FREE_UNPACKED_BYTES", 8 << 20)
    header = tarfile.TarInfo("kelf.bin")
    header.size = 512 << 20
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = packer.compress(header.tobuf())
    packed += b"".join(packer.compress(bytes(1 << 20)) for _ in range(512)) + packer.flush()
    neff = bytearray(with_header(b""))[:1024]
    neff[16:24] = struct.pack("<Q", len(packed))
    neff[172:188] = hashlib.md5(packed).digest()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MalformedNeff, match="unpacks to more than"):
        read(tmp_path, bytes(neff) + packed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_name_that_does_not_end_and_too_many_members_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tarfile.TarInfo("././@LongLink")
    endless.type, endless.size = tarfile.GNUTYPE_LONGNAME, 1 << 20
    with pytest.raises(MalformedNeff, match="a name that does not end"):
        read(tmp_path, with_header(endless.tobuf() + bytes(1 << 20)))
    monkeypatch.setattr(neff_archive, "MAX_MEMBERS", 10)
    with pytest.raises(MalformedNeff, match="more than 10 members"):
        read(tmp_path, with_header(tar_of(*[(f"f{i}", {}, b"") for i in range(20)])))


def test_what_looks_like_a_neff() -> None:
    assert looks_like_neff(GOOD[:40])
    assert not looks_like_neff(GOOD[:39])
    assert not looks_like_neff(b"PK\3\4" + bytes(40))
    assert not looks_like_neff(b"HloModule main" + b" " * 40)
    assert not looks_like_neff(bytes(40))


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    assert check_neff_file(tmp_path / "none", "trn2", 2, SIGNATURE) == [
        "cannot be read: No such file or directory"
    ]
