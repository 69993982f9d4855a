"""Deterministic speech synthesis with eSpeak NG through ctypes: equal arguments give equal samples.

eSpeak keeps state between utterances (position in the pitch flutter table, roughness cycle, gain, random numbers). No call of its
interface resets all of it. Therefore the library is loaded for every utterance, seeded, and unloaded afterwards. This costs 0.5 ms.

The optional package ``espeakng-loader`` provides the library and its voices (GPL-3). raydfl contains no part of them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import threading
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from raydfl.core.errors import ConfigError, nearest

SAMPLE_RATE = 22050
"""Sample rate of eSpeak's built-in voices in Hz."""

_SYNCHRONOUS = 2
_PARAMETERS = {"rate": 1, "pitch": 3, "pitch_range": 4}
_CHARACTERS = 1
_UTF8 = 1
_OPENED = "/proc/self/fd"
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
# The library and C's random numbers are global in a process.
_lock = threading.Lock()


def speak(
    text: str, language: str, variant: str, rate: int = 175, pitch: int = 50, pitch_range: int = 50, seed: int = 1
) -> npt.NDArray[np.float32]:
    """Synthesise a text.

    Args:
        text: words in the spelling of the language.
        language: a name of :func:`languages`.
        variant: a name of :func:`variants`.
        rate: words a minute, 80..450.
        pitch: 0..99; 50 is the pitch of the variant.
        pitch_range: liveliness, 0 (monotone)..99.
        seed: seed of breath and noise in the voice, 0..2**31 - 1.

    Returns:
        float32 [samples] at :data:`SAMPLE_RATE`, -1..1.

    Raises:
        ConfigError: eSpeak NG is not installed or fails, or the language or variant is unknown.
    """
    if language not in languages():
        raise ConfigError(f"eSpeak NG has no language {language!r}; {nearest(language, languages())}")
    if variant not in variants():
        raise ConfigError(f"eSpeak NG has no voice variant {variant!r}; {nearest(variant, variants())}")
    pieces: list[bytes] = []

    def collect(samples: int | None, count: int, _events: int | None) -> int:
        if samples and count > 0:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    callback = _CALLBACK(collect)
    with _lock:
        library = ctypes.CDLL(_loader().get_library_path())
        try:
            if library.espeak_Initialize(_SYNCHRONOUS, 0, _loader().get_data_path().encode(), 0) != SAMPLE_RATE:
                raise ConfigError(f"eSpeak NG cannot read its data in {_loader().get_data_path()}")
            library.espeak_SetSynthCallback(callback)
            _set_voice(library, language, variant)
            library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
            _c_library().srand(seed)
            for name, value in (("rate", rate), ("pitch", pitch), ("pitch_range", pitch_range)):
                library.espeak_SetParameter(_PARAMETERS[name], value, 0)
            spelt = text.encode()
            status = library.espeak_Synth(spelt, ctypes.c_size_t(len(spelt) + 1), 0, _CHARACTERS, 0, _UTF8, None, None)
            if status != 0:
                raise ConfigError(f"eSpeak NG cannot say {text!r} in {language!r} (status {status})")
            library.espeak_Terminate()
        finally:
            _unload(library)
    samples = np.frombuffer(b"".join(pieces), np.int16).astype(np.float32) / np.float32(32768)
    if not samples.any():
        raise ConfigError(
            f"eSpeak NG is silent for {text!r} in {language!r}. Use the spelling of this language, or a language "
            f"with a dictionary."
        )
    return samples


@functools.cache
def languages() -> dict[str, Path]:
    """Return eSpeak's language and accent files by lower-case name: ``en-us``, ``en-gb-x-rp``, ``de``, ``cmn`` ...

    Raises:
        ConfigError: eSpeak NG is not installed.
    """
    files = (Path(_loader().get_data_path()) / "lang").rglob("*")
    return {file.name.lower(): file for file in sorted(files) if file.is_file()}


@functools.cache
def variants() -> tuple[str, ...]:
    """Return the names of eSpeak's voice variants (over 100), sorted.

    Raises:
        ConfigError: eSpeak NG is not installed.
    """
    folder = Path(_loader().get_data_path()) / "voices" / "!v"
    return tuple(sorted(file.name for file in folder.iterdir() if not file.name.startswith(".")))


@functools.cache
def version() -> str:
    """Return the version of ``espeakng-loader``. Samples depend on it.

    Raises:
        ConfigError: eSpeak NG is not installed.
    """
    _loader()
    return importlib.metadata.version("espeakng-loader")


def _loader() -> ModuleType:
    try:
        import espeakng_loader
    except ImportError as error:
        raise ConfigError(
            "the built-in spoken corpus needs eSpeak NG: pip install 'raydfl[speech]' (or use recordings: `raydfl data list`)"
        ) from error
    module: ModuleType = espeakng_loader
    return module


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _set_voice(library: ctypes.CDLL, language: str, variant: str) -> None:
    """Choose language and variant.

    Given a language's name, eSpeak first reads all voice files (3 ms). Given its file, eSpeak copies the lower-case path, "+!v/"
    and the variant into a buffer of 40 bytes without a bounds check. The path of the open file in /proc is short enough. Without
    /proc, the name is used. Both ways give the same samples.

    Raises:
        ConfigError: eSpeak cannot load the voice.
    """
    path = languages()[language]
    with path.open("rb") as file:
        by_file = f"{_OPENED}/{file.fileno()}+{variant}".encode()
        if len(by_file) + len("!v/") < 40 and library.espeak_SetVoiceByFile(by_file) == 0:
            return
    name = path.relative_to(Path(_loader().get_data_path()) / "lang").as_posix()
    if library.espeak_SetVoiceByName(f"{name}+{variant}".encode()) != 0:
        raise ConfigError(f"eSpeak NG cannot load the voice {variant!r} in {language!r}")


def _unload(library: ctypes.CDLL) -> None:
    close = _c_library().dlclose
    close.argtypes = [ctypes.c_void_p]
    close(library._handle)
    if _is_loaded(library._name):
        warnings.warn(
            "another part of this process uses eSpeak NG, so its state persists between words. Clips of the built-in spoken corpus "
            "may depend on the order of synthesis. Prepare the data in a process of its own.",
            RuntimeWarning,
            stacklevel=3,
        )


def _is_loaded(path: str) -> bool:
    """Return whether the process has loaded a library."""
    find = _c_library().dlopen
    find.argtypes = [ctypes.c_char_p, ctypes.c_int]
    find.restype = ctypes.c_void_p
    handle = find(path.encode(), os.RTLD_NOLOAD | os.RTLD_LAZY)
    if handle is None:
        return False
    _c_library().dlclose(handle)
    return True
