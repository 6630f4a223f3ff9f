"""How fast models are: measured in turns, on a machine that is named."""

MODES = ("eager", "compiled", "onnx", "int8")
