"""``make gpu-check``: what can only be shown on a GPU, in one short run that prints markdown for docs/gpu.md."""
