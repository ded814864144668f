"""Certificates for the benchmark's server over https, made by the `openssl` command for one run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dcp_remote.errors import InvalidArgumentError


def make_certificates(folder: Path) -> tuple[Path, Path]:
    """An authority of an hour's standing, and a certificate for this machine: two files.

    Not one that signs itself: clients in Rust do not take an authority's certificate for a server's.
    """
    authority, authority_key, chain = folder / "authority.pem", folder / "authority-key.pem", folder / "server.pem"
    key: list[str | Path] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    of_authority: list[str | Path] = [
        *("-x509", "-days", "7", "-subj", "/CN=dcp_remote benchmark", "-keyout", authority_key, "-out", authority),
        *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
    ]
    of_server: list[str | Path] = [
        *("-x509", "-days", "7", "-subj", "/CN=localhost", "-CA", authority, "-CAkey", authority_key),
        *("-keyout", chain, "-out", folder / "certificate.pem", "-addext", "basicConstraints=critical,CA:FALSE"),
        *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        *("-addext", "keyUsage=critical,digitalSignature", "-addext", "extendedKeyUsage=serverAuth"),
    ]
    # Its own settings: the system's would add extensions a second time.
    settings = folder / "openssl.cnf"
    settings.write_text("[req]\ndistinguished_name = name\n[name]\n")
    for arguments in (of_authority, of_server):
        command: list[str | Path] = ["openssl", "req", "-config", settings, *key, *arguments]
        try:
            subprocess.run(command, check=True, capture_output=True)  # our own words
        except (OSError, subprocess.CalledProcessError) as error:
            raise InvalidArgumentError(
                "tls=True needs the `openssl` command, 3.0 or newer.", cause=error, said=getattr(error, "stderr", None)
            ) from error
    chain.write_bytes(chain.read_bytes() + (folder / "certificate.pem").read_bytes())
    return authority, chain
