"""Secret key of a run's noise, and the random numbers derived from it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import numpy as np

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import sync

KEY_FILE = "private.key"
"""Name of the key's file in the folder of a run. It never leaves this folder."""
_SIZE = 32
_BLOCK = 1 << 20
"""Normal numbers in a call of the hash function. It limits the memory to 8 MiB."""


class NoiseKey:
    """Key of 32 bytes. Its random numbers depend on the key, the round and the purpose alone.

    The numbers come from the hash function SHAKE-256. NumPy's generators would not do: whoever knows some of their numbers can
    compute all further ones.

    Args:
        secret: The key.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def from_seed(cls, seed: int) -> NoiseKey:
        """Derive a key from the run's seed. Knowledge of the seed reveals its noise."""
        return cls(hashlib.sha256(f"noise of the seed {seed}".encode()).digest())

    @classmethod
    def create(cls, folder: Path) -> NoiseKey:
        """Write a new random key into a run's folder, readable by its owner only. An existing key is read instead.

        Raises:
            RunDirectoryError: The folder has a key that is no key, or that other users can read.
        """
        if (folder / KEY_FILE).exists():
            return cls.read(folder)
        secret, part = os.urandom(_SIZE), folder / f".{KEY_FILE}.part"
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / KEY_FILE)
        sync(folder)  # a power cut must not lose the key of a run that has begun
        return cls(secret)

    @classmethod
    def read(cls, folder: Path, fingerprint: str = "") -> NoiseKey:
        """Read the key of a run.

        Args:
            folder: Folder of the run.
            fingerprint: :attr:`fingerprint` of the run's key. Empty: any key.

        Raises:
            RunDirectoryError: The key is missing, has a wrong size, is another run's, or other users can read it.
        """
        path = folder / KEY_FILE
        try:
            mode, secret = path.stat().st_mode, path.read_bytes()
        except OSError as error:
            raise RunDirectoryError(
                f"{path} cannot be read: {error.strerror}. The run needs its key for its noise. Restore the file from the run's "
                f"first machine, or start a new run"
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise RunDirectoryError(
                f"{path} can be read or changed by further users, and the key reveals the noise. Start a new run, or run "
                f"chmod 600 on it if the key is still secret"
            )
        key = cls(secret)
        if len(secret) != _SIZE or fingerprint not in ("", key.fingerprint):
            reason = (
                f"has {len(secret)} bytes instead of {_SIZE}" if len(secret) != _SIZE else "is the key of another run"
            )
            raise RunDirectoryError(f"{path} {reason}. Restore the run's own key, or start a new run")
        return key

    @property
    def fingerprint(self) -> str:
        """Public digest of the key: 16 hexadecimal digits."""
        return hashlib.sha256(b"fingerprint" + self._secret).hexdigest()[:16]

    def derive(self, round_index: int, purpose: str) -> NoiseKey:
        """Derive the key of a part of a round, such as a client. It reveals nothing about this key and further parts.

        Args:
            round_index: Completed rounds.
            purpose: Separates independent parts of a round.
        """
        return NoiseKey(self._expand(round_index, f"key of {purpose}", 0, _SIZE))

    def generator(self, round_index: int, purpose: str) -> np.random.Generator:
        """Return a generator with a secret seed, for draws with secret results.

        Args:
            round_index: Completed rounds.
            purpose: Separates independent draws of a round.
        """
        return np.random.default_rng(int.from_bytes(self._expand(round_index, purpose, 0, 32), "little"))

    def normals(self, round_index: int, purpose: str, size: int) -> np.ndarray:
        """Return independent standard normal numbers: float64 [size].

        Args:
            round_index: Completed rounds.
            purpose: Separates independent draws of a round.
            size: Number of values.
        """
        from scipy.special import ndtri  # only private runs need it

        values = np.empty(size)
        for block, begin in enumerate(range(0, size, _BLOCK)):
            count = min(_BLOCK, size - begin)
            words = np.frombuffer(self._expand(round_index, purpose, block, 8 * count), "<u8")
            # 52 bits: with 53, the largest number would round to 1, whose quantile is infinite.
            values[begin : begin + count] = ndtri(((words >> np.uint64(12)) + 0.5) * 2.0**-52)
        return values

    def _expand(self, round_index: int, purpose: str, block: int, size: int) -> bytes:
        text = f"{round_index}\x1f{purpose}\x1f{block}".encode()
        return hashlib.shake_256(self._secret + text).digest(size)
