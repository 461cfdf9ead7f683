"""Addresses of servers, and what may be printed of their messages."""

import os
import re
from ipaddress import ip_address
from urllib.parse import urlsplit

KEY_VARIABLE = "OPENAI_API_KEY"
MOST_SHOWN = 300
"""Most characters of a server's message that are printed."""
# Messages don't quote the address, since it may contain a password.
NO_ADDRESS = (
    f"is not an address of the form http://HOST:8000/v1; put a key into the environment variable {KEY_VARIABLE}, not "
    "into the address"
)

# Servers fill in missing parameters, some of them from the model's generation config. So every
# filter and penalty is switched off explicitly.
NO_FILTERS = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
NO_FILTERS |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def server_key() -> str:
    """Return the key of the environment, or nothing.

    Raises ValueError, without the key, for one that no HTTP header can carry.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"{KEY_VARIABLE} has a character that no key has (it isn't shown here); set it anew")
    return key


def is_address(base_url: str) -> bool:
    """Return whether `base_url` is the address of a server, without a password."""
    try:
        url = urlsplit(base_url)
        host, _ = url.hostname or "", url.port
        is_number = ":" in host or re.fullmatch(r"\d+(\.\d+){3}", host)
        is_host = bool(ip_address(host)) if is_number else re.fullmatch(r"[\w.-]+", host) is not None
    except ValueError:  # unclosed brackets, invalid port, invalid IP address
        is_host = False
    is_plain = base_url.isprintable() and " " not in base_url
    return is_host and is_plain and url.scheme in ("http", "https") and "@" not in url.netloc


def server_address(url: str) -> str:
    """Return a server's address without the path of its protocol."""
    return re.sub(r"(/v1)?/*$", "", url)


def shown(text: str) -> str:
    """Return the start of a server's message, without terminal escapes and the key, which some servers repeat."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    start = (text.replace(key, "***") if key else text)[:MOST_SHOWN]
    return "".join(character if character.isprintable() else " " for character in start)
