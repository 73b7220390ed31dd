"""Prompts and completions as ids, the same on every rank and every machine."""

import hashlib
import json
from typing import Any


def content_key(text: str) -> int:
    """The first 64 bits of a text's SHA-256, as a signed number, so that a tensor can hold it."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big", signed=True)


def to_hex(key: int) -> str:
    """A key as the first 16 hex digits of its SHA-256."""
    return f"{key & 0xFFFFFFFFFFFFFFFF:016x}"


def to_text(content: Any) -> str:
    """A prompt or completion as text; a conversation as JSON, its images by the hash of their pixels."""

    def describe(value: Any) -> str:
        pixels = value.tobytes() if callable(getattr(value, "tobytes", None)) else repr(type(value)).encode()
        return hashlib.sha256(pixels).hexdigest()

    if isinstance(content, str):
        return content.encode(errors="replace").decode()
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=describe)


def prompt_key(prompt: Any) -> int:
    """The key of a prompt, the same on every machine: of its canonical JSON."""
    return content_key(json.dumps(prompt, ensure_ascii=False) if isinstance(prompt, str) else to_text(prompt))


def prompt_id(prompt: Any) -> str:
    """
    The prompt's id in the log: the first 16 hex digits of the SHA-256 of its canonical JSON (sorted keys, no spaces).

    Example:
        >>> prompt_id("What is 2+2?")
        'ccf5a7e60d04b0bc'
    """
    return to_hex(prompt_key(prompt))
