"""Stand-in for torchaudio, which LLaMA-Factory imports. PyPI's build needs torch with CUDA, and is not installed."""
