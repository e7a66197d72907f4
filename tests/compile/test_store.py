"""Both stores keep one contract; S3 also behind a proxy that answers 500, breaks off and drips."""

import base64
import concurrent.futures
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from botocore.exceptions import UnauthorizedSSOTokenError
from s3_stand_in import BUCKET, CREDENTIALS, REGION, Proxy, proxy_before, s3_server

from nxbucket.compile.s3 import S3Store
from nxbucket.compile.store import DirectoryStore, ReadOnlyStore, Store, open_store
from nxbucket.toolkit.errors import CacheError, EnvironmentProblem, StoreError

PAYLOAD = b"an entry"
NAME = "entries/ab/abcd.json"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_before(server) as proxy:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def s3(proxy: Proxy, request: pytest.FixtureRequest) -> Store:
    prefix = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return open_store(f"s3://{BUCKET}/{prefix}")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    found: Store = request.getfixturevalue("s3")
    return found


def nobody(_: int) -> None:
    pass


def blob(tmp_path: Path, content: bytes = b"x" * 3_000_000) -> tuple[Path, str, str]:
    digest = hashlib.sha256(content).hexdigest()
    path = tmp_path / "blob"
    path.write_bytes(content)
    return path, digest, f"blobs/sha256/{digest[:2]}/{digest}"


def test_what_is_not_there_is_absent(store: Store, tmp_path: Path) -> None:
    assert store.read(NAME, 100) is None
    assert not store.fetch(NAME, tmp_path / "into", 100, nobody)
    assert store.age_s(NAME, 1, "0" * 64) is None
    assert list(store.list("entries/")) == []
    store.delete(NAME)


def test_an_entry_is_put_once(store: Store) -> None:
    assert store.put(NAME, PAYLOAD, replacing=None)
    assert not store.put(NAME, b"another one", replacing=None)
    found = store.read(NAME, 100)
    assert found is not None
    assert found.payload == PAYLOAD


def test_an_entry_is_replaced_only_in_the_version_that_was_read(store: Store) -> None:
    store.put(NAME, PAYLOAD, replacing=None)
    old = store.read(NAME, 100)
    assert old is not None
    assert store.put(NAME, b"second", replacing=old.tag)
    assert not store.put(NAME, b"third", replacing=old.tag)
    found = store.read(NAME, 100)
    assert found is not None
    assert found.payload == b"second"


def test_an_entry_that_is_gone_is_not_replaced(store: Store) -> None:
    store.put(NAME, PAYLOAD, replacing=None)
    old = store.read(NAME, 100)
    assert old is not None
    store.delete(NAME)
    assert not store.put(NAME, b"second", replacing=old.tag)
    assert store.read(NAME, 100) is None


def test_a_blob_comes_back_byte_for_byte(store: Store, tmp_path: Path) -> None:
    path, digest, name = blob(tmp_path, os.urandom(3_000_001))
    up: list[int] = []
    down: list[int] = []
    store.upload(name, path, digest, up.append)
    store.upload(name, path, digest, nobody)
    assert cast(float, store.age_s(name, 3_000_001, digest)) < 60
    assert store.age_s(name, 3_000_000, digest) is None
    assert store.fetch(name, tmp_path / "into", 3_000_001, down.append)
    assert (tmp_path / "into").read_bytes() == path.read_bytes()
    assert sum(up) == sum(down) == 3_000_001


@pytest.mark.parametrize("size_bytes", [100, 17 << 20])
def test_a_file_that_is_not_what_its_name_says_is_not_put(
    store: Store, tmp_path: Path, size_bytes: int
) -> None:
    path, digest, name = blob(tmp_path, os.urandom(size_bytes))
    flipped = bytearray(path.read_bytes())
    flipped[50] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CacheError, match=f"{path}: sha256 differs"):
        store.upload(name, path, digest, nobody)
    assert list(store.list("blobs/")) == []


def test_more_than_the_limit_is_not_taken(store: Store, tmp_path: Path) -> None:
    path, digest, name = blob(tmp_path)
    store.upload(name, path, digest, nobody)
    assert store.fetch(name, tmp_path / "into", 10, nobody)
    assert 10 < (tmp_path / "into").stat().st_size < 3_000_000
    store.put(NAME, PAYLOAD, replacing=None)
    with pytest.raises(StoreError, match="larger than 3 bytes"):
        store.read(NAME, 3)


def test_listing_finds_what_is_below_a_prefix(store: Store, tmp_path: Path) -> None:
    path, digest, name = blob(tmp_path)
    store.upload(name, path, digest, nobody)
    store.put(NAME, PAYLOAD, replacing=None)
    (entry,) = store.list("entries/")
    assert (entry.name, entry.size_bytes) == (NAME, len(PAYLOAD))
    assert abs(entry.modified_s - time.time()) < 60
    assert [found.name for found in store.list("blobs/")] == [name]
    store.delete(NAME)
    assert list(store.list("entries/")) == []


def test_a_store_that_is_only_read_refuses_the_rest(store: Store, tmp_path: Path) -> None:
    path, digest, name = blob(tmp_path)
    store.put(NAME, PAYLOAD, replacing=None)
    only = ReadOnlyStore(store)
    assert only.read(NAME, 100) == store.read(NAME, 100)
    for write in (
        lambda: only.put(NAME, b"", replacing=None),
        lambda: only.upload(name, path, digest, nobody),
        lambda: only.delete(NAME),
    ):
        with pytest.raises(StoreError, match="only read here"):
            write()


@pytest.mark.parametrize("location", ["gs://bucket/x", "http://host/x", "s3://", "s3://No_Bucket"])
def test_an_address_that_is_none_is_refused(location: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(location)
    assert "s3://bucket/prefix" in str(caught.value.hint)


def test_without_a_client_for_s3_the_mend_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    hidden = {"obstore", "botocore"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find(name)
    )
    with pytest.raises(EnvironmentProblem, match="obstore and botocore") as caught:
        open_store("s3://bucket/x")
    assert "nxbucket[s3]" in str(caught.value.hint)


# A folder


def test_a_link_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "store/entries/ab").mkdir(parents=True)
    (tmp_path / "store" / NAME).symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match="not a plain file"):
        DirectoryStore(tmp_path / "store").read(NAME, 100)


def test_a_folder_without_permission_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "entries").write_text("a file in the way")
        with pytest.raises(StoreError, match="entries"):
            DirectoryStore(tmp_path).put(NAME, PAYLOAD, replacing=None)
        return
    (tmp_path / "entries").mkdir(mode=0)
    with pytest.raises(StoreError, match="Permission denied"):
        DirectoryStore(tmp_path).read(NAME, 100)


# S3 on a bad day


@pytest.mark.parametrize("fault", ["500", "503", "reset", "slow", "twice"])
def test_what_passes_is_tried_again(s3: Store, proxy: Proxy, tmp_path: Path, fault: str) -> None:
    path, digest, name = blob(tmp_path)
    proxy.fault = lambda request: fault if request.number % 2 == 0 else None
    s3.upload(name, path, digest, nobody)
    assert s3.put(NAME, PAYLOAD, replacing=None)
    assert cast(float, s3.age_s(name, 3_000_000, digest)) < 60
    assert s3.fetch(name, tmp_path / "into", 3_000_000, nobody)
    assert (tmp_path / "into").read_bytes() == path.read_bytes()


def test_a_body_that_breaks_off_is_fetched_again(s3: Store, proxy: Proxy, tmp_path: Path) -> None:
    path, digest, name = blob(tmp_path)
    s3.upload(name, path, digest, nobody)
    proxy.fault = lambda request: "truncate" if request.number % 3 else None
    told: list[int] = []
    assert s3.fetch(name, tmp_path / "into", 3_000_000, told.append)
    assert (tmp_path / "into").read_bytes() == path.read_bytes()
    assert sum(told) == 3_000_000


def test_an_answer_that_got_lost_does_not_lose_the_put(s3: Store, proxy: Proxy) -> None:
    """The second attempt meets its own first one, and S3 says that somebody was faster."""
    start = len(proxy.seen)
    proxy.fault = lambda request: "lost" if request.number == start else None
    assert s3.put(NAME, PAYLOAD, replacing=None)


@pytest.mark.parametrize("fault", ["500", "reset"])
def test_a_server_that_stays_down_is_an_error_in_bounded_time(
    s3: Store, proxy: Proxy, tmp_path: Path, fault: str
) -> None:
    proxy.fault = lambda _: fault
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        s3.read(NAME, 100)
    assert time.monotonic() - start < 60
    assert f"/{NAME}" in caught.value.message
    assert "goes on from here" in str(caught.value.hint)


def test_a_body_that_always_breaks_off_is_an_error(s3: Store, proxy: Proxy, tmp_path: Path) -> None:
    path, digest, name = blob(tmp_path)
    s3.upload(name, path, digest, nobody)
    proxy.fault = lambda _: "truncate"
    with pytest.raises(StoreError, match=name):
        s3.fetch(name, tmp_path / "into", 3_000_000, nobody)


def test_no_permission_is_never_taken_for_absence(s3: Store, proxy: Proxy, tmp_path: Path) -> None:
    # B80, B82
    proxy.fault = lambda _: "403"
    start = len(proxy.seen)
    for ask, permission in (
        (lambda: s3.read(NAME, 100), "s3:GetObject"),
        (lambda: s3.fetch(NAME, tmp_path / "into", 100, nobody), "s3:GetObject"),
        (lambda: s3.age_s(NAME, 1, "0" * 64), "s3:GetObject"),
        (lambda: s3.put(NAME, PAYLOAD, replacing=None), "s3:PutObject"),
        (lambda: list(s3.list("entries/")), "s3:ListBucket"),
        (lambda: s3.delete(NAME), "s3:DeleteObject"),
    ):
        with pytest.raises(StoreError, match="access denied") as caught:
            ask()
        assert permission in str(caught.value.hint)
        assert BUCKET in str(caught.value.hint)
    # No use in asking again.
    assert len(proxy.seen) - start == 6


def test_a_missing_bucket_is_named(proxy: Proxy) -> None:
    with pytest.raises(StoreError, match="no bucket no-such-bucket"):
        open_store("s3://no-such-bucket/x").read(NAME, 100)


def test_missing_credentials_are_named(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="no AWS credentials") as caught:
        open_store(f"s3://{BUCKET}/x").read(NAME, 100)
    assert "AWS_PROFILE" in str(caught.value.hint)
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "1")
    assert open_store(f"s3://{BUCKET}/x").read(NAME, 100) is None


def test_a_profile_that_is_none_is_named(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match="nobody"):
        open_store(f"s3://{BUCKET}/x").read(NAME, 100)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AWS_CA_BUNDLE": "/nonexistent/ca.pem"}, "/nonexistent/ca.pem"),
        ({"AWS_CA_BUNDLE": os.devnull}, "certificate"),
        ({"AWS_ENDPOINT_URL": "localhost:9000"}, "'localhost:9000' is no address"),
        ({"AWS_ENDPOINT_URL": "http://"}, "is no address"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:99999"}, "is no address"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/nonexistent/token"}, "/nonexistent/token"),
    ],
)
def test_what_is_wrong_with_the_settings_is_never_taken_for_absence(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    if "AWS_WEB_IDENTITY_TOKEN_FILE" in variables:  # the role of a pod
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/serving")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/x")
    for ask in (lambda: store.read(NAME, 100), lambda: store.put(NAME, b"", replacing=None)):
        with pytest.raises(StoreError) as caught:
            ask()
        assert said in caught.value.message
    assert proxy.seen == []


def test_credentials_that_cannot_be_renewed_are_not_called_forbidden(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxbucket.compile.s3.CREDENTIALS_LAST", timedelta(seconds=-1))
    assert s3.read(NAME, 100) is None

    def ended(_: object) -> Any:
        raise UnauthorizedSSOTokenError

    monkeypatch.setattr("botocore.credentials.Credentials.get_frozen_credentials", ended)
    with pytest.raises(StoreError, match="SSO") as caught:
        s3.read(NAME, 100)
    assert "aws sso login" in str(caught.value.hint)


@pytest.mark.parametrize("location", ["", " ", "~nobody-of-that-name/x", "s3://bucket/a/../b"])
def test_a_place_that_is_none_is_refused(location: str) -> None:
    with pytest.raises(StoreError):
        open_store(location)


def test_a_file_is_not_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("")
    with pytest.raises(StoreError, match="is no folder"):
        open_store(str(tmp_path / "model.yaml")).read(NAME, 100)


def test_a_folder_on_a_disk_that_is_not_there_is_not_an_empty_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "not mounted/store"))
    path, digest, name = blob(tmp_path)
    for ask in (
        lambda: store.read(NAME, 100),
        lambda: store.put(NAME, b"", replacing=None),
        lambda: store.upload(name, path, digest, nobody),
    ):
        with pytest.raises(StoreError, match=r"there is no .*not mounted"):
            ask()


def test_region_endpoint_and_keys_of_a_profile_are_those_that_the_aws_cli_takes(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        f"[profile team]\nregion = eu-north-1\nendpoint_url = {proxy.endpoint}\n"
        "aws_access_key_id = OFTEAM\naws_secret_access_key = secret\n"
    )
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")

    def signed_by(field: int) -> str:
        assert open_store(f"s3://{BUCKET}/x").read(NAME, 100) is None
        return proxy.seen[-1].credential.split("/")[field]

    assert (signed_by(0), signed_by(2)) == ("OFTEAM", "eu-north-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    assert signed_by(2) == "eu-west-2"
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert signed_by(2) == "eu-west-3"


def test_a_bucket_in_another_region_is_followed_there(s3: Store, proxy: Proxy) -> None:
    proxy.fault = lambda request: None if f"/{REGION}/" in request.credential else "elsewhere"
    assert s3.read(NAME, 100) is None
    asked = len(proxy.seen)
    assert s3.put(NAME, PAYLOAD, replacing=None)
    assert len(proxy.seen) == asked + 1


def test_credentials_that_have_expired_are_said_to_have(s3: Store, proxy: Proxy) -> None:
    proxy.fault = lambda _: "expired"
    with pytest.raises(StoreError, match="they have expired") as caught:
        s3.read(NAME, 100)
    assert "aws sso login" in str(caught.value.hint)


def crc64_nvme(content: bytes) -> str:
    """As S3 writes it. Reflected polynomial 0x9A6C9329AC4BC9B5, from the NVMe specification."""
    crc = (1 << 64) - 1
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return base64.b64encode((crc ^ (1 << 64) - 1).to_bytes(8, "big")).decode()


def test_what_is_written_carries_a_signed_checksum(s3: Store, proxy: Proxy, tmp_path: Path) -> None:
    assert crc64_nvme(b"123456789") == base64.b64encode(0xAE8B14860A799888.to_bytes(8)).decode()
    path, digest, name = blob(tmp_path, b"a small program")
    s3.upload(name, path, digest, nobody)
    s3.put(NAME, PAYLOAD, replacing=None)
    for request, content in zip(proxy.seen, (b"a small program", PAYLOAD), strict=True):
        assert request.headers["x-amz-checksum-crc64nvme"] == crc64_nvme(content)
        signed = request.headers["authorization"].partition("SignedHeaders=")[2]
        assert "x-amz-checksum-crc64nvme" in signed.partition(",")[0].split(";")


@pytest.mark.parametrize("fault", [None, "reset", "503"])
def test_a_large_file_goes_up_in_parts(
    s3: Store, proxy: Proxy, tmp_path: Path, fault: str | None
) -> None:
    path, digest, name = blob(tmp_path, os.urandom(17 << 20))
    proxy.fault = lambda request: fault if request.number % 2 else None
    s3.upload(name, path, digest, nobody)
    assert len([r for r in proxy.seen if "partNumber=" in r.path]) >= 3
    proxy.fault = lambda _: None
    assert cast(float, s3.age_s(name, 17 << 20, digest)) < 60
    assert s3.fetch(name, tmp_path / "into", 17 << 20, nobody) == digest


def test_many_threads_open_a_store_once(
    s3: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    open_one = S3Store._open

    def slowly(store: S3Store, region: str | None) -> Any:
        opened.append(region)
        time.sleep(0.1)
        return open_one(store, region)

    monkeypatch.setattr(S3Store, "_open", slowly)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: s3.read(NAME, 100), range(8))) == [None] * 8
    assert len(opened) == 1


def test_every_request_stays_below_the_prefix(s3: Store, proxy: Proxy, tmp_path: Path) -> None:
    # B81
    path, digest, name = blob(tmp_path)
    s3.upload(name, path, digest, nobody)
    s3.put(NAME, PAYLOAD, replacing=None)
    s3.read(NAME, 100)
    s3.age_s(name, 1, digest)
    list(s3.list("entries/"))
    prefix = s3.location.removeprefix("s3://")
    for request in proxy.seen:
        assert request.path.startswith(f"/{prefix}/") or f"prefix={prefix.partition('/')[2]}" in (
            request.path.lower()
        )


@pytest.mark.parametrize("spelling", ["s3://{}/team", "s3://{}/team/", "s3://{}//team//"])
def test_slashes_around_the_prefix_change_nothing(proxy: Proxy, spelling: str) -> None:
    # B85
    open_store(f"s3://{BUCKET}/team").put("entries/slashes", b"x", replacing=None)
    assert open_store(spelling.format(BUCKET)).read("entries/slashes", 10) is not None


def test_a_slash_behind_the_endpoint_changes_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B85
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{proxy.endpoint}/")
    assert open_store(f"s3://{BUCKET}/team").read(NAME, 10) is None


def test_a_folder_as_store_imports_no_s3_client(tmp_path: Path) -> None:
    code = (
        "import sys; from nxbucket.compile.store import open_store; "
        f"open_store({str(tmp_path)!r}).read('entries/x', 1); "
        "print({'obstore', 'botocore'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
