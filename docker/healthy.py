#!/opt/wavegate/bin/python -IS
"""Ends with 0 if a URL answers 200: `healthy http://127.0.0.1:9090/readyz`: every container's health check.

It runs every few seconds in each of them, so it must never import what it does not need.
"""

from __future__ import annotations

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

TIMEOUT_S = 2.0


def main(url: str) -> int:
    """Ask once; the exit status, and why on stdout, where `docker inspect` shows it."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        print(f"{url}: {error}")
        return 1
    print(f"{url}: {status}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
