"""Random numbers that are equal on every device: a function of words, which name their use, and of the position.

Number i of a tensor is a hash of i under a key made of the words, computed with 32-bit integers on the tensor's device.
The hash is triple32 of C. Wellons (github.com/skeeto/hash-prospector), four xor-shifts and three multiplications, with
half of the key before each of the first two. His mixers of two multiplications, such as lowbias32, fail here: numbers
that are 768 apart, a row, are related. Philox, Threefry and Squares pass harder tests, at 20 to 60 operations, each of
which is a pass over memory in torch; triple32 takes a CPU 1 to 1.5 times as long as `torch.rand`. Not for secrets.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from thinpipe.core.seeds import derive_seed

_CPU_BLOCK, _DEVICE_BLOCK = 1 << 17, 1 << 22
"""Numbers hashed at a time, which do not depend on it: few enough for the cache of a CPU, enough to fill an
accelerator."""


def uniform(like: Tensor, *words: int | str) -> Tensor:
    """float32 multiples of 2^-24 in [0, 1), of the shape and on the device of `like`. They repeat after 2^32."""
    result = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    for part, hashes in _hashed_parts(result.view(-1), 0, *words):
        part.copy_(hashes.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)).mul_(2.0**-24)
    return result


def random_bits(like: Tensor, *words: int | str, start: int = 0) -> Tensor:
    """32 random bits for each number of `like`, as int32. `start`: position of the first number of `like` in a larger
    tensor, the bits of which do not depend on the parts in which they are drawn."""
    result = torch.empty(like.shape, dtype=torch.int32, device=like.device)
    for part, hashes in _hashed_parts(result.view(-1), start, *words):
        part.copy_(hashes)
    return result


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """float32 numbers rounded to bfloat16, up or down with the probability that keeps their mean (stochastic rounding).

    Decided by the lowest 16 of the random `bits` (`random_bits`). Overwrites `values`.
    """
    rounded = values.view(torch.int32).add_(bits & 0xFFFF).bitwise_right_shift_(16)
    return rounded.to(torch.int16).view(torch.bfloat16)


def dropout(x: Tensor, rate: float, *words: int | str) -> Tensor:
    """`x` / (1 - rate), with every element set to zero with probability `rate`. Autograd saves one byte per element."""
    return (x * (1 / (1 - rate))).masked_fill(uniform(x, *words) < rate, 0.0)


def _hashed_parts(numbers: Tensor, start: int, *words: int | str) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of `numbers`, one after the other, each with the int32 hashes of its positions, counted from `start`. The
    memory of the hashes is that of the next part's too."""
    second_key, first_key = divmod(derive_seed(*words), 1 << 32)
    block = _CPU_BLOCK if numbers.device.type == "cpu" else _DEVICE_BLOCK
    offsets = torch.arange(min(block, len(numbers)), dtype=torch.int32, device=numbers.device)
    hashes, scratch = torch.empty_like(offsets), torch.empty_like(offsets)
    for begin in range(0, len(numbers), block):
        part = numbers[begin : begin + block]
        x = torch.add(offsets[: len(part)], _as_int32(start + begin), out=hashes[: len(part)])
        x.bitwise_xor_(_as_int32(first_key))
        _triple32_(x, second_key, scratch[: len(part)])
        yield part, x


def _triple32_(x: Tensor, key: int, scratch: Tensor) -> None:
    """Hashes int32 numbers in place. Products wrap around."""
    _xor_shift_(x, 17, scratch)
    x.mul_(_as_int32(0xED5AD4BB)).bitwise_xor_(_as_int32(key))
    _xor_shift_(x, 11, scratch)
    x.mul_(_as_int32(0xAC4C1B51))
    _xor_shift_(x, 15, scratch)
    x.mul_(0x31848BAB)
    _xor_shift_(x, 14, scratch)


def _xor_shift_(x: Tensor, bits: int, scratch: Tensor) -> None:
    """x ^= x >> bits, filled with zeros; torch shifts copies of the sign in."""
    torch.bitwise_right_shift(x, bits, out=scratch).bitwise_and_((1 << (32 - bits)) - 1)
    x.bitwise_xor_(scratch)


def _as_int32(word: int) -> int:
    """The signed integer with the lowest 32 bits of `word`."""
    return ((word + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
