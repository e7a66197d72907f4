"""`nxbucket inspect`: told apart by content, never by name, and never with a traceback."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cli_here import cli_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuronx_cc_stand_in import make_neff

NEFF = make_neff([16, 4], [8], lnc=2)


def inspect(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    payload: bytes,
    folder: Path,
    *arguments: str,
) -> tuple[int, str, str]:
    file = folder / "file"
    file.write_bytes(payload)
    return cli_here(monkeypatch, capsys, "inspect", str(file), *arguments)


def test_a_neff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = inspect(monkeypatch, capsys, NEFF, tmp_path)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["kind", "NEFF", "2.0,", "package", "2,", "gzip"] in rows
    assert ["target", "trn2", "('cayman')"] in rows
    assert ["lnc", "2"] in rows
    assert ["digest", "md5", "ok"] in rows
    assert ["sg01", "input", "16", "input0"] in rows
    code, out, _ = inspect(monkeypatch, capsys, NEFF, tmp_path, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["kind"]) == (0, True, "neff")
    assert (found["targets"], found["lnc"], found["digest"]) == (["trn2"], 2, "ok")
    assert {"name": "kelf-0.json", "size_bytes": 148} in found["members"]


def test_a_damaged_neff_is_shown_as_far_as_it_goes_and_ends_in_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped = bytearray(NEFF)
    flipped[1100] ^= 1
    code, out, err = inspect(monkeypatch, capsys, bytes(flipped), tmp_path)
    assert code == 1
    assert "md5 differs" in out
    assert "is damaged" in err
    code, out, _ = inspect(monkeypatch, capsys, bytes(flipped), tmp_path, "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    code, _, err = inspect(monkeypatch, capsys, NEFF[:1500], tmp_path)
    assert code == 1
    assert "is cut off: its header promises" in err
    assert "hint: nxbucket compile makes it again" in err
    code, out, _ = inspect(monkeypatch, capsys, NEFF[:1500], tmp_path, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "artifact")


def package(folder: Path) -> bytes:
    file = folder / "package"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("p/data/aotinductor/model/a.wrapper_metadata.json", '{"AOTI_DEVICE_KEY": "cpu"}')
        z.writestr("p/archive_format", "pt2")
        z.writestr("p/archive_version", "0")
        z.writestr("p/data/aotinductor/model/a.wrapper.so", bytes(1000))
    return file.read_bytes()


def test_a_pt2_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = package(tmp_path)
    code, out, _ = inspect(monkeypatch, capsys, payload, tmp_path)
    assert code == 0
    assert "AOTI_DEVICE_KEY" in out
    assert "not recorded" in out
    code, out, _ = inspect(monkeypatch, capsys, payload, tmp_path, "--json")
    found = json.loads(out)
    assert (found["kind"], found["archive_format"], found["torch"]) == ("pt2", "pt2", None)
    assert found["metadata"] == {"AOTI_DEVICE_KEY": "cpu"}
    assert found["size_bytes"] == len(payload)
    code, _, err = inspect(monkeypatch, capsys, payload[:-40], tmp_path)
    assert code == 1
    assert "is a damaged package" in err


def test_other_files_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for payload in (b"", b"hello", bytes(5000)):
        code, _, err = inspect(monkeypatch, capsys, payload, tmp_path)
        assert code == 2
        assert "is not a NEFF, .pt2 or HLO" in err
    for path in (tmp_path, tmp_path / "none"):
        code, _, err = cli_here(monkeypatch, capsys, "inspect", str(path))
        assert code == 2
        assert "no file" in err


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_package_with_other_bytes_is_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: st.DataObject,
) -> None:
    payload = bytearray(package(tmp_path))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(4, len(payload) - 1))] = data.draw(st.integers(0, 255))
    code, _, _ = inspect(monkeypatch, capsys, bytes(payload), tmp_path)
    assert code in (0, 1)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    script = (
        "import sys\nfrom nxbucket.toolkit import cli\n"
        f"sys.argv = ['nxbucket', 'inspect', {str(file)!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'jax', 'vllm', 'numpy'} & set(sys.modules)\n"
    )
    for payload in (NEFF, package(tmp_path)):
        file.write_bytes(payload)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
