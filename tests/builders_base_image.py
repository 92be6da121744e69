"""The image that the Dockerfile starts from, wherever this machine gets it: pulled, or made by debootstrap.

It is given what this machine needs to reach its package index, so that the Dockerfile need not know of it.
"""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.builders_docker import ROOT, CommandFailed, Docker, archive, memory_folder

PULL_TIMEOUT_S = 180.0
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
DEBOOTSTRAP_TIMEOUT_S = 600.0
TREE_BYTES = 1 << 30
LEFT_OUT = ("./var/cache/apt/archives", "./var/lib/apt/lists", "./dev", "./proc", "./sys")

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")


def default_base_image() -> str:
    """What the Dockerfile starts from when nobody says otherwise."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def make_base_image(docker: Docker, tag: str) -> str:
    """Make a base image called `tag`; the result says from what. Other images that this takes are removed."""
    wanted, plain = default_base_image(), f"{tag}-plain"
    if docker("image", "ls", "--quiet", wanted).strip():
        docker("tag", wanted, plain)
        made_from = f"{wanted}, which was here"
    elif _was_pulled(docker, wanted):
        docker("tag", wanted, plain)
        docker("rmi", wanted)
        made_from = f"{wanted}, pulled"
    else:
        _import_debootstrap(docker, plain)
        made_from = f"debootstrap {SUITE}, since {wanted} cannot be pulled here"
    docker("build", "--quiet", "--tag", tag, "-", stdin=_build_context(plain))
    docker("rmi", plain)
    return made_from


def _was_pulled(docker: Docker, image: str) -> bool:
    try:
        docker("pull", "--quiet", image, timeout_s=PULL_TIMEOUT_S)
    except (CommandFailed, subprocess.TimeoutExpired):
        return False
    return True


def _import_debootstrap(docker: Docker, tag: str) -> None:
    if shutil.which("debootstrap") is None:
        raise CommandFailed("no image can be pulled here, and there is no debootstrap to make one")
    # dpkg waits for the disk after every file, if there is one.
    with tempfile.TemporaryDirectory(prefix="wavegate-base-", dir=memory_folder(TREE_BYTES)) as name:
        root = Path(name) / "root"
        docker.run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *_mirror(docker)],
            timeout_s=DEBOOTSTRAP_TIMEOUT_S,
        )
        tar_command = ["tar", "-C", str(root), *(f"--exclude={path}/*" for path in LEFT_OUT), "-c", "."]
        with subprocess.Popen(tar_command, stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            docker("import", "-", tag, stdin=tar.stdout.fileno())


def _mirror(docker: Docker) -> list[str]:
    """Where this machine gets the same suite from, if it does."""
    sources = docker.run(["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)"]).splitlines()
    sites = [site for codename, _, site in (source.partition(" ") for source in sources) if codename == SUITE]
    return sites[:1]


def _build_context(plain: str) -> bytes:
    """A Dockerfile that adds this machine's certificate authorities and pip's settings, and its file."""
    authorities = Path(ssl.get_default_verify_paths().cafile or CA_BUNDLE)
    lines = [f"FROM {plain}"]
    files = {}
    if authorities.is_file():
        files["ca.crt"] = authorities.read_bytes()
        lines += [f"COPY ca.crt {CA_BUNDLE}", f"ENV PIP_CERT={CA_BUNDLE}"]
    lines += [
        f'ENV PIP_{name.upper().replace("-", "_")}="{value}"' for name, value in _pip_settings().items()
    ]
    files["Dockerfile"] = "\n".join(lines).encode()
    return archive(files)


def _pip_settings() -> dict[str, str]:
    """Those of pip's settings here that say how it reaches its index, as far as they hold in a container."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        reachable = " ".join(part for part in value.strip("'").split() if not part.startswith(("file:", "/")))
        if name in PIP_SETTINGS and reachable:
            settings[name] = reachable
    return settings
