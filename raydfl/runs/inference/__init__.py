"""What to do with a trained model: classify recordings, write it as ONNX."""
