"""A process holds its own segment and no more: the embedding and two blocks of an 8B model, peak memory measured."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, re, torch
from dataclasses import replace
from thinpipe.models import PRESETS, build, materialise
materialise(build(PRESETS["llama-tiny"]), seed=0)  # what the libraries load at first use is not the model's
# Not ru_maxrss: a child inherits the peak of the process that started it.
rss = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
before = rss()
segment = build(replace(PRESETS["llama-8b"], boundaries=(2,))).segments[0]
on_meta = rss()
materialise(segment, seed=0, dtype=torch.bfloat16)
nbytes = sum(tensor.nbytes for tensor in (*segment.parameters(), *segment.buffers()))
names = sorted({name.split(".")[1] for name, _ in segment.named_parameters()})
print(json.dumps({"meta": on_meta - before, "peak": rss() - before, "nbytes": nbytes, "names": names}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_materialising_two_blocks_and_the_embedding_of_8b_holds_nothing_more():
    # glibc otherwise keeps freed blocks of up to 32 MB for later, now more and now less of them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=600, env=environment
    )
    measured = json.loads(done.stdout)
    assert measured["names"] == ["0", "1", "embed_tokens"]
    assert measured["nbytes"] > 1.9e9
    assert measured["meta"] < 50e6  # 8,030,261,248 parameters on the meta device weigh nothing
    # One chunk of random numbers (16 MB) and the rotary tables' temporaries are all there is beside the segment.
    assert measured["nbytes"] < measured["peak"] < measured["nbytes"] + 80e6
