"""Models at work: exported, in int8, on ONNX Runtime, classifying images."""
