"""Print the transcript during a recording, by a model exported with raydfl export --streaming.

python jobs/transcribe_stream.py MODEL-streaming.onnx FILE
"""

import json
import sys

import numpy as np
import onnxruntime
import soundfile

session = onnxruntime.InferenceSession(sys.argv[1])
about = json.loads(session.get_modelmeta().custom_metadata_map["raydfl"])
kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
state = {
    given.name: np.zeros([1 if size == "batch" else size for size in given.shape], kinds[given.type])
    for given in session.get_inputs()
    if given.name != "samples"
}
samples, rate = soundfile.read(sys.argv[2], dtype="float32", always_2d=True)
piece, heard = rate * 200 // 1000, []
for start in range(0, len(samples), piece):
    tokens, final, *following = session.run(None, {"samples": samples[None, start : start + piece, 0], **state})
    state = dict(zip(state, following, strict=True))
    best = tokens[0].argmax(axis=1).tolist()
    outputs = [*heard, *best]
    heard += best[: final[0]]  # the other tokens come again with the next samples
    units = [
        about["classes"][now] for before, now in zip([0, *outputs], outputs, strict=False) if now not in (0, before)
    ]
    print(f"{(start + piece) / rate:.2f} s", about["separator"].join(units))
