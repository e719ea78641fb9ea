from __future__ import annotations
import json
from kvtier.simulate.trace import *
def read_trace(path):
    ids = PrefixIds(); reqs=[]
    for line in open(path):
        d = json.loads(line)
        reqs.append(TraceRequest(d["timestamp"]/1000, ids.number(d["hash_ids"]), d["input_length"], d["output_length"], d["input_length"]))
    return Trace(str(path), "mooncake", 512, reqs)
