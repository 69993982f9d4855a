"""Speech synthesis by eSpeak NG through ctypes. The same arguments give the same samples in every process.

eSpeak keeps state between utterances: positions in tables of flutter and roughness, gain, random numbers. No call of its interface
resets all of it. raydfl therefore seeds the random numbers, and loads and unloads the library for each utterance (0.5 ms).

The package ``espeakng-loader`` contains the library and its voices. It is optional, because eSpeak NG is under the GPL-3.
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
"""Sampling rate of eSpeak's voices in Hz."""

_SYNCHRONOUS = 2
_PARAMETERS = {"rate": 1, "pitch": 3, "pitch_range": 4}
_CHARACTERS = 1
_UTF8 = 1
_OPENED = "/proc/self/fd"
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
# The process shares a single library, and C's random numbers.
_lock = threading.Lock()


def speak(
    text: str, language: str, variant: str, rate: int = 175, pitch: int = 50, pitch_range: int = 50, seed: int = 1
) -> npt.NDArray[np.float32]:
    """Synthesise a text.

    Args:
        text: the text, spelt in the language.
        language: a key of :func:`list_languages`.
        variant: a name of :func:`list_variants`.
        rate: words per minute, 80 to 450.
        pitch: 0 to 99; 50 is the variant's default.
        pitch_range: intonation, 0 (monotone) to 99.
        seed: seed of the noise in the voice, 0 to 2**31 - 1.

    Returns:
        float32 [samples] at :data:`SAMPLE_RATE`, -1 to 1.

    Raises:
        ConfigError: eSpeak NG is missing or fails, or the language or variant is unknown.
    """
    if language not in list_languages():
        raise ConfigError(f"eSpeak NG has no language {language!r}. {nearest(language, list_languages())}")
    if variant not in list_variants():
        raise ConfigError(f"eSpeak NG has no voice variant {variant!r}. {nearest(variant, list_variants())}")
    pieces: list[bytes] = []

    def collect(samples: int | None, count: int, _events: int | None) -> int:
        if samples and count > 0:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    callback = _CALLBACK(collect)
    with _lock:
        library = ctypes.CDLL(_import_loader().get_library_path())
        try:
            if library.espeak_Initialize(_SYNCHRONOUS, 0, _import_loader().get_data_path().encode(), 0) != SAMPLE_RATE:
                folder = _import_loader().get_data_path()
                raise ConfigError(f"eSpeak NG cannot read its data in {folder}. Reinstall the package espeakng-loader")
            library.espeak_SetSynthCallback(callback)
            _set_voice(library, language, variant)
            library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
            _load_c_library().srand(seed)
            for name, value in (("rate", rate), ("pitch", pitch), ("pitch_range", pitch_range)):
                library.espeak_SetParameter(_PARAMETERS[name], value, 0)
            spelt = text.encode()
            status = library.espeak_Synth(spelt, ctypes.c_size_t(len(spelt) + 1), 0, _CHARACTERS, 0, _UTF8, None, None)
            if status != 0:
                raise ConfigError(f"eSpeak NG cannot speak {text!r} in {language!r} (status {status})")
            library.espeak_Terminate()
        finally:
            _unload(library)
    samples = np.frombuffer(b"".join(pieces), np.int16).astype(np.float32) / np.float32(32768)
    if not samples.any():
        raise ConfigError(
            f"eSpeak NG returns silence for {text!r} in {language!r}. Spell it in the language, or choose another language"
        )
    return samples


@functools.cache
def list_languages() -> dict[str, Path]:
    """List the files of eSpeak's languages and accents by name in lower case: ``en-us``, ``en-gb-x-rp``, ``de``, ``cmn`` ...

    Raises:
        ConfigError: eSpeak NG is not installed.
    """
    files = (Path(_import_loader().get_data_path()) / "lang").rglob("*")
    return {file.name.lower(): file for file in sorted(files) if file.is_file()}


@functools.cache
def list_variants() -> tuple[str, ...]:
    """List the names of eSpeak's voice variants (over 100), sorted.

    Raises:
        ConfigError: eSpeak NG is not installed.
    """
    folder = Path(_import_loader().get_data_path()) / "voices" / "!v"
    return tuple(sorted(file.name for file in folder.iterdir() if not file.name.startswith(".")))


@functools.cache
def get_version() -> str:
    """Return the version of the library's package. Samples may differ between versions.

    Raises:
        ConfigError: eSpeak NG is not installed.
    """
    _import_loader()
    return importlib.metadata.version("espeakng-loader")


def _import_loader() -> ModuleType:
    try:
        import espeakng_loader
    except ImportError as error:
        raise ConfigError(
            "the built-in spoken corpus needs eSpeak NG. Run pip install 'raydfl[speech]', or choose a set of recordings "
            "(`raydfl data list`)"
        ) from error
    module: ModuleType = espeakng_loader
    return module


@functools.cache
def _load_c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _set_voice(library: ctypes.CDLL, language: str, variant: str) -> None:
    """Set language and variant.

    To find a language by name, eSpeak reads the files of all voices (3 ms). By file it reads only this file, but it converts the
    path to lower case and copies path, "+!v/" and variant into 40 bytes without a check. The path through the file descriptor is
    short enough. Without /proc the language is set by name. The samples are equal.

    Raises:
        ConfigError: eSpeak cannot load the voice.
    """
    path = list_languages()[language]
    with path.open("rb") as file:
        by_file = f"{_OPENED}/{file.fileno()}+{variant}".encode()
        if len(by_file) + len("!v/") < 40 and library.espeak_SetVoiceByFile(by_file) == 0:
            return
    name = path.relative_to(Path(_import_loader().get_data_path()) / "lang").as_posix()
    if library.espeak_SetVoiceByName(f"{name}+{variant}".encode()) != 0:
        raise ConfigError(f"eSpeak NG cannot load the voice {variant!r} in {language!r}")


def _unload(library: ctypes.CDLL) -> None:
    close = _load_c_library().dlclose
    close.argtypes = [ctypes.c_void_p]
    close(library._handle)
    if _is_loaded(library._name):
        warnings.warn(
            "eSpeak NG stays in memory between words, because this process uses it elsewhere, too. Clips of the built-in spoken "
            "corpus may depend on the order in which they are made. Use eSpeak NG in a separate process",
            RuntimeWarning,
            stacklevel=3,
        )


def _is_loaded(path: str) -> bool:
    """Return true if a library is in memory, without loading it."""
    find = _load_c_library().dlopen
    find.argtypes = [ctypes.c_char_p, ctypes.c_int]
    find.restype = ctypes.c_void_p
    handle = find(path.encode(), os.RTLD_NOLOAD | os.RTLD_LAZY)
    if handle is None:
        return False
    _load_c_library().dlclose(handle)
    return True
