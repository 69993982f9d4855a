"""Print the predictions of an exported model during a recording.

python jobs/classify_stream.py MODEL-streaming.onnx FILE
"""

import json
import sys

import numpy as np
import onnxruntime
import soundfile

session = onnxruntime.InferenceSession(sys.argv[1])
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
state = {
    given.name: np.zeros([1 if size == "batch" else size for size in given.shape], kinds[given.type])
    for given in session.get_inputs()
    if given.name != "samples"
}
samples, rate = soundfile.read(sys.argv[2], dtype="float32", always_2d=True)
piece = rate * 20 // 1000
for start in range(0, len(samples), piece):
    answer, *following = session.run(None, {"samples": samples[None, start : start + piece, 0], **state})
    state = dict(zip(state, following, strict=True))
    print(f"{(start + piece) / rate:.2f} s", classes[answer[0].argmax()], f"{answer[0].max():.2f}")
