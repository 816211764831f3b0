"""Host names, as strict as a shell and an ssh command line need them."""

from __future__ import annotations

import re

_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?", re.ASCII)


def check_host_name(name: str) -> str:
    """`name`, when RFC 1123 allows it.

    Names reach command lines (`ssh HOST`), where one like `-oProxyCommand=...` is an attack.

    Raises:
        ValueError: it is not a host name.
    """
    if len(name) <= 253 and all(_LABEL.fullmatch(label) for label in name.split(".")):
        return name
    raise ValueError(
        f'"{name}" is not a host name: letters, digits, "-" and "." only, no "-" at an end of '
        "a part, at most 63 characters a part and 253 in all (RFC 1123)"
    )
