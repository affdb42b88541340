"""Weight formats: which tensors a Linear stores and how to multiply by them. One file per format."""
