"""eSpeak NG through ctypes: a word in, samples out, the same samples for the same arguments whatever was said before.

eSpeak keeps state from one utterance to the next (the place in its pitch flutter table, the cycle that its roughness counts, gain,
random numbers), some of it in variables that no call of its interface resets. So the library is loaded for each utterance and
unloaded after it, which costs half a millisecond, and its random numbers are seeded.

The library and its voices come with the package ``espeakng-loader`` (eSpeak NG is GPL-3: an extra, nothing of it is in raydfl).
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
"""Hz, of all of eSpeak's own voices."""

_SYNCHRONOUS = 2
_PARAMETERS = {"rate": 1, "pitch": 3, "pitch_range": 4}
_CHARACTERS = 1
_UTF8 = 1
_OPENED = "/proc/self/fd"
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
# The library is one for the whole process, and so are C's random numbers.
_lock = threading.Lock()


def speak(
    text: str, language: str, variant: str, rate: int = 175, pitch: int = 50, pitch_range: int = 50, seed: int = 1
) -> npt.NDArray[np.float32]:
    """Say a text.

    Args:
        text: what to say, spelt in the language.
        language: a name of :func:`languages`.
        variant: a name of :func:`variants`.
        rate: words a minute, 80..450.
        pitch: 0..99, 50 is the variant's own.
        pitch_range: liveliness, 0 (monotone)..99.
        seed: of breath and other noise in the voice, 0..2**31 - 1.

    Returns:
        float32 [samples] at :data:`SAMPLE_RATE`, -1..1.

    Raises:
        ConfigError: eSpeak NG is not installed or does not work, or it has no such language or variant.
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
            f"eSpeak NG says nothing for {text!r} in {language!r}; spell it in that language, or choose one that has a dictionary"
        )
    return samples


@functools.cache
def languages() -> dict[str, Path]:
    """Return the files of eSpeak's languages and accents by name in lower case: ``en-us``, ``en-gb-x-rp``, ``de``, ``cmn`` ...

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
    """Return the version of the package that brings the library: another one may say the same word with other samples.

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
    """Chooses language and variant.

    By a language's name, eSpeak first reads the files of all voices (3 ms). By its file it does not, but it turns the path to
    lower case and writes path, "+!v/" and variant into 40 bytes without looking at their length: hence a path through the
    opened file, which is short. Where there is no /proc, it is done by name; the samples are the same either way.

    Raises:
        ConfigError: neither way works.
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
            "eSpeak NG stays in memory between words, since something else in this process uses it: clips of the built-in spoken "
            "corpus may then depend on the order in which they are made",
            RuntimeWarning,
            stacklevel=3,
        )


def _is_loaded(path: str) -> bool:
    """Return whether a library is in memory, without loading it."""
    find = _c_library().dlopen
    find.argtypes = [ctypes.c_char_p, ctypes.c_int]
    find.restype = ctypes.c_void_p
    handle = find(path.encode(), os.RTLD_NOLOAD | os.RTLD_LAZY)
    if handle is None:
        return False
    _c_library().dlclose(handle)
    return True
