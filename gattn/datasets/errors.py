"""The error that data sets raise."""

from __future__ import annotations

__all__ = ["DatasetUnavailableError"]


class DatasetUnavailableError(FileNotFoundError):
    """A data set is missing, cannot be downloaded, or cannot be read.

    The message names the files concerned and says what to do.
    """
