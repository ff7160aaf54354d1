"""One process of a pipeline over a Hugging Face model that trains on packed chats; writes every message that reached
it, as the transport filled it in."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.huggingface.captures import train_chats
from tests.pipeline.counting import open_counting_group, open_counting_nats_group


def main() -> None:
    folder, schedule = Path(sys.argv[1]), sys.argv[2]
    output = Path(sys.argv[3]).with_suffix(f".{os.environ['RANK']}")
    torch.set_num_threads(1)
    group: Any = (open_counting_nats_group if "BROKER" in os.environ else open_counting_group)(600)
    received: list[tuple[int, int, torch.Tensor]] = []
    """Sender, tag, and the buffer that the transport fills."""
    post = group.recv

    def recv(tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        received.append((src, tag, tensor))
        return post(tensors, src, tag)

    group.recv = recv
    train_chats(folder, schedule=schedule, group=group)
    named = {f"{index} {src} {tag}": tensor for index, (src, tag, tensor) in enumerate(received)}
    save_file({name: tensor.reshape(-1).view(torch.uint8) for name, tensor in named.items()}, output)
    dist.destroy_process_group()
    print("{}")


if __name__ == "__main__":
    main()
