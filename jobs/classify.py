"""Print the predictions of an exported model for recordings, with the front end in NumPy.

python jobs/classify.py MODEL.onnx FILE...
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import soundfile
from front_end import features, segments, wave

path = Path(sys.argv[1])
about = json.loads(path.with_suffix(".json").read_text())
front_end, inputs = about["front_end"], about["onnx"]["inputs"]
session = onnxruntime.InferenceSession(path)
for file in sys.argv[2:]:
    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    average = (front_end["segments"] or {"average": "probabilities"})["average"]
    found = []
    for part in segments(features(wave(samples, rate, front_end), front_end), front_end):
        given = {"x": part[None]}
        if "lengths" in inputs:
            missing = max(0, inputs["x"]["least_frames"] - len(part))
            given = {"x": np.pad(part, ((0, missing), (0, 0)))[None], "lengths": np.array([len(part)])}
        found.append(session.run([average], given)[0][0])
    probabilities = np.mean(found, axis=0)
    if average == "logits":
        probabilities = np.exp(probabilities - probabilities.max())
        probabilities /= probabilities.sum()
    print(file, about["classes"][probabilities.argmax()], f"{probabilities.max():.4f}")
