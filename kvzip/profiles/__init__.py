"""What is learned once per model and shared by many files: RoPE, scales, bases; kvzip's ``zstd --train``."""
