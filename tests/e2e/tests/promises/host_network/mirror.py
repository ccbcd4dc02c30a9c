"""A mirror of npm, pip, cargo and apt with one package `tiny` each, and a git host with one repository, also
under a private name, over TLS: mirror.py FOLDER, which holds server.pem, server.key and lib.git. Prints its port."""

import base64
import gzip
import hashlib
import io
import json
import ssl
import subprocess
import sys
import tarfile
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FOLDER = sys.argv[1]
BASE = "https://mirror.corp.example"
TOKEN = b"github-planted-of-ada"


def tarball(folder, files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            about = tarfile.TarInfo(folder + name)
            about.size, about.mode = len(text), 0o755
            archive.addfile(about, io.BytesIO(text.encode()))
    return out.getvalue()


def deb():
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": tarball("./", {"control": CONTROL}),
        "data.tar.gz": tarball("./", {"usr/bin/tiny": "#!/bin/sh\necho tiny from apt\n"}),
    }
    out = b"!<arch>\n"
    for name, data in members.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data
        out += b"\n" * (len(data) % 2)
    return out


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def wheel():
    out, about = io.BytesIO(), "tiny-1.0.0.dist-info/"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("tiny.py", 'NAME = "tiny from pip"\n')
        archive.writestr(about + "METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0.0\n")
        archive.writestr(
            about + "WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(about + "RECORD", "tiny.py,,\n")
    return out.getvalue()


CONTROL = "Package: tiny\nVersion: 1.0.0\nArchitecture: all\nMaintainer: A <a@b.c>\nDescription: tiny\n"
TARBALL, WHEEL, DEB = tarball(
    "package/",
    {
        "package.json": '{"name": "tiny", "version": "1.0.0", "main": "index.js"}',
        "index.js": 'module.exports = "tiny from npm"',
    },
), wheel(), deb()
CRATE = tarball(
    "tiny-1.0.0/",
    {
        "Cargo.toml": '[package]\nname = "tiny"\nversion = "1.0.0"\n',
        "src/lib.rs": "// tiny from cargo\n",
    },
)
INDEX = {"name": "tiny", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False, "cksum": sha256(CRATE)}
PACKAGES = f"{CONTROL}Filename: pool/tiny.deb\nSize: {len(DEB)}\nSHA256: {sha256(DEB)}\n".encode()
RELEASE = (
    "Codename: bookworm\nArchitectures: amd64\nComponents: main\nDate: Thu, 01 Jan 2026 00:00:00 UTC\n"
    f"SHA256:\n {sha256(PACKAGES)} {len(PACKAGES)} main/binary-amd64/Packages\n"
).encode()
DIST = {
    "tarball": BASE + "/npm/tiny/-/tiny-1.0.0.tgz",
    "integrity": "sha512-" + base64.b64encode(hashlib.sha512(TARBALL).digest()).decode(),
}
VERSION = {"name": "tiny", "version": "1.0.0", "dist": DIST}
PACKAGE = {"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": VERSION}}
WHEEL_NAME = "tiny-1.0.0-py3-none-any.whl"
FILES = {
    "/npm/tiny": ("application/json", json.dumps(PACKAGE).encode()),
    "/npm/tiny/-/tiny-1.0.0.tgz": ("application/octet-stream", TARBALL),
    "/simple/tiny/": ("text/html", f'<a href="{BASE}/{WHEEL_NAME}">{WHEEL_NAME}</a>'.encode()),
    "/" + WHEEL_NAME: ("application/octet-stream", WHEEL),
    "/cargo/config.json": ("application/json", json.dumps({"dl": BASE + "/crates"}).encode()),
    "/cargo/ti/ny/tiny": ("text/plain", json.dumps(INDEX).encode() + b"\n"),
    "/crates/tiny/1.0.0/download": ("application/octet-stream", CRATE),
    "/debian/dists/bookworm/Release": ("text/plain", RELEASE),
    "/debian/dists/bookworm/main/binary-amd64/Packages": ("text/plain", PACKAGES),
    "/debian/pool/tiny.deb": ("application/octet-stream", DEB),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, kind, body, headers=()):
        self.send_response(status)
        for name, value in [("Content-Type", kind), ("Content-Length", str(len(body))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def repository(self):
        """The path below a repository; None without one, or without the token of a private one."""
        for name in ["/acme/lib.git", "/acme/private.git"]:
            if self.path.startswith(name + "/"):
                given = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
                if "private" not in name or given.endswith(b":" + TOKEN):
                    return self.path.removeprefix(name)
        return None

    def upload_pack(self, *arguments, body=b""):
        argv = ["git", "upload-pack", "--stateless-rpc", *arguments, FOLDER + "/lib.git"]
        return subprocess.run(argv, input=body, stdout=subprocess.PIPE, check=True).stdout

    def do_GET(self):
        if self.path in FILES:
            return self.answer(200, *FILES[self.path])
        # As some hosts do for a URL without `.git`.
        if self.path.startswith("/acme/lib/info/refs?"):
            moved = [("Location", self.path.replace("/lib/", "/lib.git/"))]
            return self.answer(301, "text/plain", b"", moved)
        if self.repository() == "/info/refs?service=git-upload-pack":
            kind = "application/x-git-upload-pack-advertisement"
            head = b"001e# service=git-upload-pack\n0000"
            return self.answer(200, kind, head + self.upload_pack("--advertise-refs"))
        # As GitHub does for a private repository.
        self.answer(401 if "/private.git/" in self.path else 404, "text/plain", b"nothing here\n")

    def do_POST(self):
        body = self.read_body()
        if self.repository() == "/git-upload-pack":
            kind = "application/x-git-upload-pack-result"
            return self.answer(200, kind, self.upload_pack(body=body))
        # npm asks for audits and the like.
        self.answer(404, "text/plain", b"nothing here\n")

    def read_body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(FOLDER + "/server.pem", FOLDER + "/server.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
