"""An S3 bucket over HTTPS on this machine: folders as objects, under an authority of its own."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class Bucket:
    name: str
    url: str
    authority: Path
    """Certificate that signed the server's, in PEM."""
    reads: list[str] = field(default_factory=list)
    """Keys of the objects that were read, weights in many ranges."""


@contextmanager
def bucket(folders: dict[str, Path], place: Path, name: str = "models") -> Iterator[Bucket]:
    """Serve `folders` by their prefixes; the bucket's own files have none. place: for the certificates."""
    objects = {
        f"{prefix}/{file.name}".lstrip("/"): file for prefix, folder in folders.items() for file in folder.iterdir()
    }
    authority, chain = _certificates(place)
    served = Bucket(name, "", authority)
    handler = type("Handler", (_Handler,), {"objects": objects, "bucket": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    served.url = f"https://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, Path]
    bucket: Bucket

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, bucket, key = (*unquote(address.path).split("/", 2), "")[:3]
        if bucket != self.bucket.name:
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif key:
            self._object(key)
        else:
            self._list(parse_qs(address.query).get("prefix", [""])[0])

    do_HEAD = do_GET  # noqa: N815

    def _list(self, prefix: str) -> None:
        listed = {key: file for key, file in self.objects.items() if key.startswith(prefix)}
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{file.stat().st_size}</Size></Contents>"
            for key, file in sorted(listed.items())
        )
        head = f"<Name>{self.bucket.name}</Name><KeyCount>{len(listed)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{head}{entries}</ListBucketResult>".encode())

    def _object(self, key: str) -> None:
        file = self.objects.get(key)
        if file is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        self.bucket.reads.append(key)
        size = file.stat().st_size
        byte_range = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = byte_range.partition("-")
        with file.open("rb") as opened:
            opened.seek(int(first or 0))
            part = opened.read(int(last) + 1 - int(first) if last else -1)
        headers = {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{size}"} if byte_range else {}
        self._answer(206 if byte_range else 200, part, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"1"', **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _certificates(place: Path) -> tuple[Path, Path]:
    """An authority, and a server's chain with its key."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "platform")])
    anyone = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bucket")])
    root = (
        _builder(authority, authority, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    leaf = (
        _builder(anyone, authority, key)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = place / "ca.crt", place / "server.pem"
    files[0].write_bytes(root.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(leaf.public_bytes(serialization.Encoding.PEM) + private)
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:  # fmt: skip
    at = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - datetime.timedelta(days=1))
        .not_valid_after(at + datetime.timedelta(days=1))
    )
