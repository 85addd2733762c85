"""The aarch64 wheel, tried on an x86 machine: see __main__.py."""
