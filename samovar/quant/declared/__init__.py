"""What config.json says about a quantized checkpoint. One file for each `quant_method`, found by its name.

Each has `read(declared) -> SchemeOf`, and refuses by name what nothing here can compute.
"""
