"""An S3 server on loopback (moto's), and a proxy before it that misbehaves as a test asks.

moto keeps what it is given in memory and knows conditional puts and checksums; it does not check
permissions unless told to.
"""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "artifacts"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    # Neither a person's own profile nor the host's role may get in.
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_EC2_METADATA_DISABLED": "true",
}

Fault = Callable[["Request"], str | None]
"""Of a request: None to pass it on; "500", "503", "403" or "404" to answer that; "reset" to break
the connection off; "truncate" to send half of the body; "slow" to drip it; "lost" to pass it on and
break off instead of answering; "twice" to pass it on two times; "elsewhere" to answer that the
bucket is in REGION; "expired" that the credentials have."""
REGION = "eu-west-1"
ANSWERS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "403": (403, "AccessDenied"),
    "404": (404, "NoSuchKey"),
    "elsewhere": (301, "PermanentRedirect"),
    "expired": (400, "ExpiredToken"),
}


@dataclass(frozen=True)
class Request:
    number: int
    method: str
    path: str
    credential: str
    """KEY/DATE/REGION/s3/aws4_request, of the signature; empty where there is none."""
    headers: dict[str, str]
    """Names in small letters."""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a server with one empty bucket."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield endpoint
    finally:
        server.stop()


@dataclass
class Proxy:
    """`fault` may be changed while it runs; `seen` holds every request."""

    endpoint: str
    upstream: str
    fault: Fault = lambda _: None
    seen: list[Request] = field(default_factory=list)


@contextlib.contextmanager
def proxy_before(upstream: str) -> Iterator[Proxy]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self._body()
            with lock:
                signature = self.headers.get("Authorization", "").partition("Credential=")[2]
                credential = signature.partition(",")[0]
                request = Request(
                    len(proxy.seen),
                    self.command,
                    self.path,
                    credential,
                    {name.lower(): value for name, value in self.headers.items()},
                )
                proxy.seen.append(request)
            fault = proxy.fault(request)
            if fault == "reset":
                self._break_off()
                return
            if fault in ANSWERS:
                self._refuse(*ANSWERS[fault])
                return
            for _ in range(2 if fault == "twice" else 1):
                status, headers, content = self._pass_on(body)
            if fault == "lost":
                self._break_off()
                return
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = {n.lower(): v for n, v in headers}.get("content-length")
            announced = length if self.command == "HEAD" and length else str(len(content))
            self.send_header("Content-Length", announced)
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault == "truncate":
                self.wfile.write(content[: len(content) // 2])
                self._break_off()
                return
            if fault == "slow":
                for i in range(0, len(content), 1 << 14):
                    self.wfile.write(content[i : i + (1 << 14)])
                    time.sleep(0.01)
                return
            self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        def _body(self) -> bytes:
            if self.headers.get("Expect", "").lower() == "100-continue":
                pass  # The base class has answered.
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                content = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return content
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            host = upstream.removeprefix("http://")
            connection = http.client.HTTPConnection(host, timeout=60)
            headers = {
                n: v
                for n, v in self.headers.items()
                if n.lower() not in ("transfer-encoding", "expect", "connection", "content-length")
            }
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response.status, response.getheaders(), content

        def _refuse(self, status: int, code: str) -> None:
            content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(status)
            if code == "PermanentRedirect":
                self.send_header("x-amz-bucket-region", REGION)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _break_off(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                # Linger of nothing: the peer sees a reset, not an orderly end.
                off = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off)
                self.wfile.flush()
                self.connection.close()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # A client that went away is what some tests are about.

    lock = threading.Lock()
    server = Server(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{server.server_port}", upstream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
