"""Fuzzing: any bytes are decoded or refused by name, in bounded time and memory. See README.md."""
