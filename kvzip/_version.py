"""The one place that holds kvzip's version; the build reads it too."""

__version__ = "0.1.0.dev0"
