"""`kvtier bench`: a running server measured with pairs of requests, with and without loading.

`client` speaks HTTP, `run` sends the pairs, `result` has what was measured.
"""
