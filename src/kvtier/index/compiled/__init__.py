"""The part of the index that numba compiles: its table, its names, its hashes, and its reader of batches.

Importing anything here needs numba (the extra `index`). Compiled functions are kept on disk, so only the
first process on a machine waits for the compiler. They release the GIL, and none of them is for several
threads at once.
"""

__all__ = []
