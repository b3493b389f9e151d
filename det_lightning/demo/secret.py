"""The place of a planted fault: drawn in a worker, sealed in a file, known outside only by its hash until it is opened."""

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Secret:
    """One bit of one weight.

    Attributes:
        step: optimizer step after which it is flipped.
        index: flat, row-major.
        bit: 0 to 31.
        nonce: makes the seal impossible to guess from the few places there are.
    """

    step: int
    parameter: str
    index: int
    bit: int
    nonce: str


def draw_secret(sizes: dict[str, int], steps: int, seal: Path) -> Secret:
    """Draws a place uniformly over steps, elements and bits with the system's randomness, and writes it to `seal`."""
    places = [(parameter, index) for parameter, size in sizes.items() for index in range(size)]
    secret = Secret(1 + secrets.randbelow(steps), *secrets.choice(places), secrets.randbelow(32), secrets.token_hex(16))
    seal.write_text(json.dumps(asdict(secret), sort_keys=True))
    return secret


def seal_hash(seal: Path) -> str:
    """SHA-256 of the sealed file."""
    return hashlib.sha256(seal.read_bytes()).hexdigest()


def open_seal(seal: Path) -> Secret:
    """What was drawn."""
    return Secret(**json.loads(seal.read_text()))
