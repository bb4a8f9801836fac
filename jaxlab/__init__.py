"""Learning methods that spend less: communication, memory, bits, parameters and samples."""

__version__ = "0.1.0"
