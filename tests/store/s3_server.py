"""A server that speaks S3, in a thread of the tests, and fails as it is told."""

import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.request import Request, urlopen
from uuid import uuid4
from wsgiref.types import StartResponse, WSGIEnvironment

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from simbal.store.bucket import Bucket

KEY, SECRET = "AKIDEXAMPLE0000", "s3cr3t-of-the-bucket"
REQUESTS = {
    "entry": r"PUT .*/history/",
    "checkpoint": r"PUT .*/objects/.*\.ckpt",
    "reading": r"GET .*/history/",
    "listing": r"GET .*prefix=",
}
ANSWERS = {
    "slow_down": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "unavailable": ("503 Service Unavailable", "ServiceUnavailable", "Try again."),
    "expired": ("400 Bad Request", "ExpiredToken", f"The provided token has expired: {SECRET}"),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
}


class S3Server:
    """The server, with one bucket.

    A fault is one of ANSWERS; `reset`: the connection breaks in the middle of the request; `lost`: it breaks once the
    request is done, before the answer; `hang`: no answer comes; `continue`: none but a late `100 Continue`.
    """

    def __init__(self) -> None:
        self.bucket = f"bucket-{uuid4().hex}"  # moto's buckets outlive a server
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.application = DomainDispatcherApplication(create_backend_app)
        self.faults: list[list] = []  # pattern of `PUT /bucket/name`, kind, how often
        self.struck: list[str] = []
        self.hanging, self.ended = threading.Event(), threading.Event()

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients find it."""
        url = f"http://127.0.0.1:{self.server.server_port}"
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"}

    def fails(self, pattern: str, kind: str, times: int = 1) -> None:
        """Fail as often at requests that match."""
        self.faults.append([re.compile(pattern), kind, times])

    def __call__(self, environ: WSGIEnvironment, start: StartResponse):
        query = f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else ""
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{query}"
        kind = self._strikes(request)
        if kind in ANSWERS:
            status, code, message = ANSWERS[kind]
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]
        if kind in ("hang", "continue"):
            if kind == "continue":
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                environ["werkzeug.socket"].sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.hanging.set()
            self.ended.wait()
            return []
        if kind == "reset":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            return self._reset(environ)
        answer = self.application(environ, start)
        return self._reset(environ) if kind == "lost" else answer

    def _strikes(self, request: str) -> str:
        for fault in self.faults:
            if fault[2] and fault[0].search(request):
                fault[2] -= 1
                self.struck.append(request)
                return fault[1]
        return ""

    @staticmethod
    def _reset(environ: WSGIEnvironment) -> list[bytes]:
        connection = environ["werkzeug.socket"]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        raise ConnectionError("reset on purpose")


@contextmanager
def serving() -> Iterator[S3Server]:
    """Serve within the block."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server = S3Server()
    thread = threading.Thread(target=server.server.serve_forever, daemon=True)
    thread.start()
    try:
        urlopen(Request(f"{server.environment['AWS_ENDPOINT_URL']}/{server.bucket}", method="PUT")).close()
        yield server
    finally:
        server.ended.set()
        server.server.shutdown()
        thread.join()


def everything(bucket: Bucket) -> dict[str, bytes]:
    """All objects of a bucket."""
    return {name: bucket.read(name) or b"" for name in bucket.names("")}
