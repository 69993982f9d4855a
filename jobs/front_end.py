"""Compute the features of an exported model from its description."""

import math
from fractions import Fraction

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def wave(samples, rate, front_end):
    """[samples] at the model's rate, of samples [samples, channels] in -1..1 at ``rate`` Hz."""
    channel = front_end["samples"]["channel"]
    mono = samples.mean(axis=1) if channel == "mean" else samples[:, 0 if channel == "first" else channel]
    how = front_end["resample"]
    ratio = Fraction(how["to_hz"], rate).limit_denominator(how["largest_denominator"])
    old, new = ratio.denominator, ratio.numerator
    if old == new:
        return mono
    cutoff = min(old, new) * how["rolloff"]
    width = math.ceil(how["zero_crossings"] * old / cutoff)
    times = np.arange(-width, width + old) / old - np.arange(new)[:, None] / new
    times = np.clip(times * cutoff, -how["zero_crossings"], how["zero_crossings"])
    filters = np.sinc(times) * np.cos(times * np.pi / how["zero_crossings"] / 2) ** 2 * cutoff / old
    parts = sliding_window_view(np.pad(mono, (width, width + old)), filters.shape[1])[::old]
    return (parts @ filters.T).ravel()[: math.ceil(new * len(mono) / old)]


def triangles(front_end):
    """Weights of the Fourier bins in the mel bands: [fft // 2 + 1, bands]."""
    mel = front_end["mel"]
    hz = np.linspace(0, mel["high_hz"], 200_001)
    if mel["formula"] == "htk":
        scale = 2595 * np.log10(1 + hz / 700)
    else:
        scale = np.where(hz < 1000, 3 * hz / 200, 15 + 27 * np.log(np.maximum(hz, 1) / 1000) / math.log(6.4))
    edges = np.interp(np.linspace(np.interp(mel["low_hz"], hz, scale), scale[-1], mel["bands"] + 2), scale, hz)
    bins = np.linspace(0, mel["highest_bin_hz"], front_end["spectrogram"]["fft"] // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(np.minimum(rising, falling), 0)


def features(wave, front_end):
    """Compute float32 [frames, bands]."""
    how, trim = front_end["spectrogram"], front_end["trim"]
    if trim["db"] is not None:
        size = trim["block_samples"]
        power = np.array([np.mean(wave[at : at + size] ** 2) for at in range(0, len(wave), size)])
        loud = np.flatnonzero(power >= power.max() * 10 ** (-trim["db"] / 10))
        wave = wave[loud[0] * size : (loud[-1] + 1) * size]
    wave = wave[: front_end["cut"]["samples"]]
    missing = max(0, front_end["silence"]["least_samples"] - len(wave))
    wave = np.pad(wave, (missing // 2, missing - missing // 2))
    if front_end["scale"]["unit_norm"]:
        wave = wave / np.sqrt(max((wave.astype(float) ** 2).sum(), front_end["scale"]["least"]))
    whole = len(wave) if how["centred"] else max(0, len(wave) - how["window_samples"])
    frames = 1 + whole // how["hop_samples"]
    wave = np.pad(wave, (0, max(0, how["least_samples"] - len(wave))))
    window = np.zeros(how["fft"])
    start = (how["fft"] - how["window_samples"]) // 2
    turn = 2 * np.pi * np.arange(how["window_samples"]) / how["window_samples"]
    window[start : start + how["window_samples"]] = 0.5 - 0.5 * np.cos(turn)
    wave = np.pad(wave, how["fft"] // 2, "reflect") if how["centred"] else np.pad(wave, (start, how["fft"]))
    parts = sliding_window_view(wave, how["fft"])[:: how["hop_samples"]][:frames]
    sums = np.abs(np.fft.rfft(parts * window)) ** how["power"] @ triangles(front_end)
    x = front_end["log"]["factor"] * np.log(np.maximum(sums, front_end["log"]["floor"]))
    end = front_end["normalise"]
    if end["over"] == "clip":
        x = (x - x.mean(axis=0)) / (x.std(axis=0) + end["epsilon"])
    if end["over"] in ("group", "client", "part"):
        # null in runs over sites: take mean and deviation over a speaker's recordings
        x = (x - np.array(end["mean"])) / (np.array(end["deviation"]) + end["epsilon"])
    x = np.pad(x, ((0, max(0, (front_end["pad"]["frames"] or 0) - len(x))), (0, 0)))
    return x.astype(front_end["dtype"]).astype(np.float32)


def segments(x, front_end):
    """Cut a recording's features into the inputs of the model."""
    how = front_end["segments"]
    if how is None:
        size = front_end["crop"]["frames"] or len(x)
        start = max(0, len(x) - size) // 2
        return [normalised(x[start : start + size], front_end["normalise"])]
    beyond = max(0, len(x) - how["frames"])
    number = 1 + beyond // how["stride"] if how["keep_last"] else max(1, round(beyond / how["stride"]))
    parts = (x[start : start + how["frames"]] for start in range(0, number * how["stride"], how["stride"]))
    return [normalised(part, front_end["normalise"]) for part in parts]


def normalised(part, how):
    """Normalise a part with its own statistics, without trailing frames of zeros."""
    if how["over"] != "example" or not part.any():
        return part
    real = len(part) - part.any(axis=1)[::-1].argmax()
    scaled = (part[:real] - part[:real].mean(axis=0)) / (part[:real].std(axis=0) + how["epsilon"])
    return np.pad(scaled, ((0, len(part) - real), (0, 0)))
