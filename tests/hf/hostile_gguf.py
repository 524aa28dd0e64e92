"""Load mutated GGUF files and see that nothing but a ValueError comes out, within bounds of memory and time.

``python tests/hf/hostile_gguf.py FOLDER COUNT SEED``, FOLDER holding good files; `test_gguf_hostile` runs it.
"""

import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from moefuse.cli.gguf import facts
from moefuse.hf.gguf import from_gguf
from moefuse.nn import MoE
from moefuse.nn.from_gguf import expert_layers
from moefuse.quant.gguf import _TYPES, GGUFFile, read

MEMORY = 100e6  # bytes beyond the file's
MESSAGE = 2000  # letters
NUMBERS = (0, 1, 2, 3, 5, 7, 64, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, -1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", " ", "a", "$A:0", "<s>", "a:b", "{{", "\0", "é", "🙂", "ab" * 500, "x" * 100_000, "🙂" + "y" * 300_000)
#: type of a number in the header -> how it is written
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Raw(bytes):
    """A value as it stands in the file, its type first."""


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def array(kind: int, count: int, body: bytes) -> Raw:
    return Raw(struct.pack("<IIQ", 9, kind, count) + body)


def value(found: Any) -> bytes:
    if isinstance(found, Raw):
        return found
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    if isinstance(found, bool):
        return struct.pack("<I?", 7, found)
    if isinstance(found, int):
        return struct.pack("<Iq", 11, found) if found < 0 else struct.pack("<IQ", 10, found & (2**64 - 1))
    if isinstance(found, float):
        return struct.pack("<Id", 12, found)
    if isinstance(found, np.ndarray):
        kind = {"u1": 0, "i4": 5, "u4": 4, "f4": 6, "u8": 10, "i8": 11, "f8": 12}[found.dtype.str[1:]]
        return array(kind, len(found), found.tobytes())
    return array(8, len(found), b"".join(map(text, found)))


def nested(rng: random.Random) -> Raw:
    """Arrays of arrays: deep, wide, or claiming more than there is."""
    count = rng.choice((1, 10, 1000, 100_000))
    body = struct.pack("<IQ", rng.choice((4, 8, 9)), 0) * count
    for _ in range(rng.randrange(6)):
        body, count = struct.pack("<IQ", 9, count) + body, 1
    return array(9, count if rng.random() < 0.7 else rng.choice(NUMBERS) & (2**63 - 1), body)


def strange(rng: random.Random, found: Any) -> Any:
    """Something else in the place of a value."""
    what = rng.randrange(7)
    if what == 0:
        return rng.choice(NUMBERS)
    if what == 1:
        return rng.choice(FLOATS)
    if what == 2:
        return rng.choice(TEXTS)
    if what == 3:
        return nested(rng)
    if what == 4:
        return array(rng.choice(tuple(FORMS)), rng.choice(NUMBERS) & (2**64 - 1), bytes(rng.choice((0, 8, 64))))
    if what == 5:
        return np.array([rng.choice(NUMBERS[:10]) for _ in range(rng.choice((0, 1, 2, 3, 2000)))], "<i8")
    return damaged_array(rng, found) if isinstance(found, (list, np.ndarray)) else rng.random() < 0.5


def damaged_array(rng: random.Random, found: Any) -> Any:
    if isinstance(found, np.ndarray):
        found = found.copy()
        for _ in range(rng.choice((0, 1, 100))):
            if len(found):
                found[rng.randrange(len(found))] = rng.choice((0, 1, 2, 3, 4, 6, 7, 100))
        return found[: rng.randrange(len(found) + 1)] if rng.random() < 0.3 else found
    found = list(found)
    for _ in range(rng.choice((1, 2, 50))):
        at = rng.randrange(len(found) + 1)
        found[at : at + rng.randrange(2)] = [rng.choice((*TEXTS, rng.choice(found or ["b"])))] * rng.choice(
            (0, 1, 1, 3)
        )
    return found


def pieces(rng: random.Random, keys: dict[str, Any]) -> None:
    """A tokenizer with scores and no merges."""
    tokens = ["<unk>", "<s>", *(chr(97 + i) for i in range(26)), "ab", "abc", *rng.sample(TEXTS, 3)]
    keys |= {
        "tokenizer.ggml.model": rng.choice(("llama", "gemma4")), "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([rng.choice(FLOATS[:6]) for _ in tokens], "<f4"),
        "tokenizer.ggml.token_type": np.array([rng.choice((1, 1, 2, 3, 4, 6)) for _ in tokens], "<i4"),
    }  # fmt: skip
    keys.pop("tokenizer.ggml.merges", None)


def mutant(rng: random.Random, file: GGUFFile, data: bytes) -> bytes:
    """The file with up to three things wrong."""
    keys: dict[str, Any] = dict(file.metadata)
    infos = [[info.name, [*reversed(info.shape)], info.type, info.offset] for info in file.infos.values()]
    start = min(info.offset for info in file.infos.values())
    numbers = {name: number for number, (name, *_) in _TYPES.items()}
    counts = [len(infos), len(keys)]
    for _ in range(rng.randint(1, 3)):
        what = rng.randrange(10)
        info = rng.choice(infos)
        if what < 4:
            name = rng.choice(list(keys))
            keys[name] = strange(rng, keys[name])
        elif what == 4:
            keys.pop(rng.choice(list(keys)))
        elif what == 5:
            pieces(rng, keys)
        elif what == 6:
            name = rng.choice(list(keys))
            keys["k" * rng.choice((1, 256, 257, 70_000, 3_000_000))] = keys[name]
        elif what == 7:
            other = rng.choice(("blk.01", "blk.\u0661", "blk." + "9" * 20))
            info[0] = rng.choice((info[0].replace("blk.1", other), "n" * 300, "", rng.choice(infos)[0]))
        elif what == 8:
            info[1] = rng.choice(
                ([], [1], [0], info[1][::-1], info[1][:1], [*info[1], 1], [2**40, 2**40], [256, 1, 1, 1])
            )
            info[2] = rng.choice((info[2], info[2], *numbers))
        else:
            info[3] = rng.choice((rng.choice(infos)[3], info[3] + 1, start + 2**62, start + 32))
    counts = [len(infos), len(keys)] if rng.random() < 0.9 else [rng.choice(NUMBERS) & (2**64 - 1) for _ in range(2)]
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    header += b"".join(text(name) + value(found) for name, found in keys.items())
    for name, dims, kind, offset in infos:
        header += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, numbers[kind], max(offset - start, 0))
    made = header + bytes(-len(header) % 32) + data[start:]
    if rng.random() < 0.1:
        made = made[: rng.randrange(len(made))]
    return made


def megabytes(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def short(error: ValueError) -> None:
    assert len(str(error)) < MESSAGE, f"a message of {len(str(error))} letters"


def load(path: Path) -> str:
    """How far a file gets: every way in that a user has."""
    try:
        file = read(path)
        facts(file)
        for layer in expert_layers(file)[:1]:
            MoE.from_gguf(file, layer)
    except ValueError as error:
        short(error)
    try:
        model, tokenizer = from_gguf(path, progress=False)
    except ValueError as error:
        short(error)
        return "refused"
    tokenizer("it was the $A:0 best <s> 🙂", return_tensors="pt")
    assert model.config.num_hidden_layers > 0
    return "loaded"


def main(folder: Path, count: int, seed: int) -> None:
    goods = [(read(path), path.read_bytes()) for path in sorted(folder.glob("*.gguf"))]
    for good, _ in goods:  # imports and caches, which the mutants must not pay for
        assert load(good.path) == "loaded"
    target = folder / "mutant"
    results = {"refused": 0, "loaded": 0}
    most, slowest = 0.0, 0.0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        made = mutant(rng, *rng.choice(goods))
        target.write_bytes(made)
        size = len(made)
        del made
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, started = megabytes("VmRSS"), time.process_time()
        try:
            results[load(target)] += 1
        except BaseException as error:
            target.rename(folder / "kept")
            raise AssertionError(f"seed {seed}, file {number}, kept as {folder / 'kept'}: {error!r:.300}") from error
        over, took = megabytes("VmHWM") - before - size, time.process_time() - started
        most, slowest = max(most, over), max(slowest, took)
        assert over < MEMORY, f"seed {seed}, file {number}: {over / 1e6:.0f} MB beyond the file's {size / 1e6:.1f}"
    print(count, results["refused"], results["loaded"], int(most), f"{slowest:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
