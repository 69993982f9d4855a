"""Print the predictions of an exported model for recordings at its sample rate.

python jobs/classify_waves.py MODEL-wave.onnx FILE...
"""

import json
import sys

import onnxruntime
import soundfile

session = onnxruntime.InferenceSession(sys.argv[1])
about = session.get_modelmeta().custom_metadata_map
rate, classes = int(about["sample_rate"]), json.loads(about["classes"])
for file in sys.argv[2:]:
    samples, file_rate = soundfile.read(file, dtype="float32", always_2d=True)
    if file_rate != rate:
        sys.exit(f"{file} has {file_rate} Hz. Resample it to {rate} Hz.")
    (answer,) = session.run(None, {"samples": samples[None, :, 0]})[0]
    print(file, classes[answer.argmax()], f"{answer.max():.4f}")
