"""GGUF files: round trips, agreement with the gguf package, and what a damaged file does."""

import mmap
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from moefuse import QuantTensor
from moefuse.quant.formats import FORMATS
from moefuse.quant.gguf import read, write
from moefuse.testing.random_blocks import random_blocks

METADATA = {
    "general.architecture": "qwen3moe",
    "general.name": "a small model",
    "qwen3moe.expert_count": 4,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.rope": 1e6,
    "small": -3,
    "big": 2**40,
    "very_small": -(2**40),
    "yes": True,
    "tokens": ["a", "", "ü€"],
    "numbers": [1, 2, 3],
    "scores": [0.5, -1.5],
}


def tensors(rng: torch.Generator) -> dict[str, torch.Tensor | QuantTensor]:
    made: dict = {name: random_blocks(name, (2, 3, 512), rng, 0.1) for name, form in FORMATS.items() if form.ggml >= 0}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        made[str(dtype)] = torch.randn(3, 5, generator=rng).to(dtype)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        made[str(dtype)] = torch.randint(-99, 99, (7,), generator=rng).to(dtype)
    return made


@pytest.fixture
def path(tmp_path: Path, rng: torch.Generator) -> Path:
    write(tmp_path / "model.gguf", METADATA, tensors(rng))
    return tmp_path / "model.gguf"


def test_blocks_are_written_in_the_file_order(tmp_path: Path, rng: torch.Generator) -> None:
    made = {name: tensor for name, tensor in tensors(rng).items() if isinstance(tensor, QuantTensor)}
    assert len(made) > 2
    write(tmp_path / "a.gguf", METADATA, made)
    write(tmp_path / "b.gguf", METADATA, {name: one.arranged("planes") for name, one in made.items()})
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_round_trip(tmp_path: Path, rng: torch.Generator) -> None:
    made = tensors(rng)
    write(tmp_path / "a.gguf", METADATA, made)
    file = read(tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert list(file) == list(made)
    assert file.architecture == "qwen3moe"
    for name, want in made.items():
        got = file[name]
        if isinstance(want, QuantTensor):
            assert isinstance(got, QuantTensor)
            assert (got.format, got.shape) == (want.format, want.shape)
            assert torch.equal(got.blocks, want.blocks)
        else:
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    assert {key: found[key] for key in METADATA} == METADATA


def test_as_the_gguf_package_reads(path: Path) -> None:
    ours, theirs = read(path), gguf.GGUFReader(path)
    assert [t.name for t in theirs.tensors] == list(ours)
    for tensor in theirs.tensors:
        info = ours.infos[tensor.name]
        assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert list(info.shape) == [int(n) for n in reversed(tensor.shape)]
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert keys == list(ours.metadata)
    for key in keys:
        want, got = theirs.fields[key].contents(), ours.metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == want


def test_experts_are_views_of_the_map(path: Path) -> None:
    """No copy; a write stays in this process."""
    file = read(path)
    stack = file["Q4_K"]
    base = file._maps[0].data_ptr()
    assert stack[1].blocks.data_ptr() == base + file.infos["Q4_K"].offset + stack.nbytes // 2
    before = path.read_bytes()
    file["torch.float32"].zero_()
    assert path.read_bytes() == before
    assert (file["torch.float32"] == 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may keep the pages")
def test_released_pages_are_read_anew(tmp_path: Path) -> None:
    made = {name: torch.arange(float(2**16)).view(2, -1) for name in ("a", "b", "c")}
    write(tmp_path / "a.gguf", METADATA, made)
    file = read(tmp_path / "a.gguf")
    views = {name: file[name] for name in made}
    for view in views.values():
        view.zero_()
    file.release("b")
    assert not views["a"].any(), "neighbours keep what was written to them"
    assert not views["c"].any()
    whole_pages = mmap.PAGESIZE // 4
    inner = slice(whole_pages, -whole_pages)
    assert torch.equal(views["b"].flatten()[inner], made["b"].flatten()[inner])


def test_the_map_outlives_file_and_name(path: Path) -> None:
    stack = read(path)["Q8_0"]
    want = stack.blocks.clone()
    write(path, {"general.architecture": "other"}, {"x": torch.ones(4)})
    assert torch.equal(stack.blocks, want)
    assert list(read(path)) == ["x"]


def split(folder: Path, claimed: object = 3) -> Path:
    for part in range(3):
        keys = METADATA | {"split.count": claimed, "split.no": part}
        made = {f"w{part}": torch.full((2,), float(part)), f"v{part}": torch.ones(1)}
        write(folder / f"m-{part + 1:05}-of-00003.gguf", keys, made)
    return folder / "m-00001-of-00003.gguf"


def test_a_model_in_several_files(tmp_path: Path) -> None:
    file = read(split(tmp_path))
    assert list(file) == ["w0", "v0", "w1", "v1", "w2", "v2"]
    assert [file[f"w{part}"].tolist() for part in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert file.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    first = split(tmp_path)
    second = tmp_path / "m-00002-of-00003.gguf"
    with pytest.raises(ValueError, match=r"must be the first of its 3 files, named NAME-00001-of-00003\.gguf"):
        read(second)
    write(second, METADATA, {"w0": torch.ones(1)})
    with pytest.raises(ValueError, match="parts must not share tensors, got 'w0' twice"):
        read(first)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="m-00002-of-00003"):
        read(first)
    for claimed in (7, 2**40):
        with pytest.raises(ValueError, match=f"must be the first of its {claimed} files"):
            read(split(tmp_path, claimed))
    for claimed in (-1, "x", 1.5, [3, 3]):
        with pytest.raises(ValueError, match="split.count must be a number of files, got"):  # noqa: RUF043
            read(split(tmp_path, claimed))


def test_formats_that_cannot_be_read_are_listed_and_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", np.zeros((2, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = read(tmp_path / "a.gguf")
    assert (file.infos["w"].type, file.infos["w"].shape) == ("IQ2_XXS", (2, 256))
    with pytest.raises(ValueError, match=r"w must be of one of the types Q4_K.*got IQ2_XXS"):
        file["w"]


def test_the_other_types_are_what_gguf_says() -> None:
    from moefuse.quant.gguf import _TYPES

    sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    newer = {40, 41} - set(sizes)  # gguf 0.18 has no NVFP4 and no Q1_0
    assert {number: row[:3] for number, row in _TYPES.items() if number not in newer} == sizes


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(keys: list[bytes] = (), infos: list[bytes] = (), counts: tuple[int, int] | None = None) -> bytes:
    tensors, pairs = counts or (len(infos), len(keys))
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + b"".join(keys) + b"".join(infos)


def info(name: str = "w", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


HUGE = 2**63 - 1
#: what is wrong -> the file, and what is said
DAMAGED = {
    "empty": (b"", "must be a GGUF file, got 0 bytes"),
    "short": (b"GGUF\3\0\0\0", "must be a GGUF file, got 8 bytes"),
    "magic": (b"GGML" + bytes(28), "must begin with GGUF, got b'GGML'"),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version must be 2 or 3, got 1"),
    "big_endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "must be little-endian, got a big-endian file: gguf-convert-endian",
    ),
    "many_tensors": (header(counts=(HUGE, 0)), "number of tensors must be at most"),
    "many_keys": (header(counts=(0, HUGE)), "number of keys must be at most"),
    "missing_keys": (header(counts=(0, 3)), "the name of key 0 at byte 24 must lie within the file"),
    "missing_infos": (header(counts=(2, 0), infos=[info()]), "the name of tensor 1 .* must lie within the file"),
    "long_name": (header([struct.pack("<Q", HUGE)]), "the name of key 0 .* must lie within the file"),
    "long_string": (header([key("k", 8, struct.pack("<Q", 2**40))]), "'k' at byte .* must lie within the file"),
    "bad_kind": (header([key("k", 77, b"12345678")]), "the type of 'k' must be from 0 to 12, got 77"),
    "long_array": (header([key("k", 9, struct.pack("<IQ", 4, HUGE))]), "'k' at byte .* must lie within the file"),
    "long_strings": (header([key("k", 9, struct.pack("<IQ", 8, HUGE))]), "the length of 'k' must fit the file"),
    "bad_element": (header([key("k", 9, struct.pack("<IQ", 13, 1))]), "the type of 'k' must be from 0 to 12, got 13"),
    "deep": (header([key("k", 9, struct.pack("<IQ", 9, 1) * 50)]), "nested at most 4 deep"),
    "wide": (header([key("k", 9, struct.pack("<IQ", 9, 2 * 10**5) + struct.pack("<IQ", 4, 0) * 2 * 10**5)]), "memory"),
    "deep_and_wide": (
        header([key("k", 9, struct.pack("<IQIQ", 9, 1, 9, 2 * 10**5) + struct.pack("<IQ", 8, 0) * 2 * 10**5)]),
        "the header must take at most 67108864 bytes of memory beyond its own, got more at 'k'",
    ),
    "name": (header([key("n" * 300, 7, b"\1")]), "the name of key 0 at byte 24 must have at most 256 bytes, got 300"),
    "tensor_name": (header(infos=[info("n" * 300)]), "the name of tensor 0 .* at most 256 bytes, got 300"),
    "text": (header([key("k", 8, text("x" * (2**24 + 1)))]), "'k' at byte .* at most 16777216 bytes, got 16777217"),
    "twice": (header([key("k", 7, b"\1")] * 2), "keys must differ, got 'k' twice"),
    "alignment": (header([key("general.alignment", 4, struct.pack("<I", 24))]), "power of two, got 24"),
    "alignment_zero": (header([key("general.alignment", 4, bytes(4))]), "power of two, got 0"),
    "alignment_name": (header([key("general.alignment", 8, text("x" * 999))]), "power of two, got 'xxx"),
    "split": (header([key("split.count", 8, text("x" * 10**6))]), "must be a number of files, got 'xxx"),
    "rank": (header(infos=[info(dims=(1,) * 5)]), "the rank of 'w' must be at most 4, got 5"),
    "type": (header(infos=[info(kind=99)]), "must be one that ggml has, got 99"),
    "dims": (header(infos=[info(dims=(HUGE, HUGE, HUGE))]), "must be positive and fit the file"),
    "no_dim": (header(infos=[info(dims=(0, HUGE))]), "must be positive and fit the file"),
    "part_block": (header(infos=[info(dims=(300, 2), kind=12)]) + bytes(999), "multiple of 256 values in Q4_K"),
    "odd_offset": (header(infos=[info(offset=1)]) + bytes(99), "must be a multiple of 32, got 1"),
    "far_offset": (header(infos=[info(offset=2**62)]) + bytes(99), "'w' must lie within the file"),
    "truncated": (header(infos=[info(dims=(64,))]) + bytes(99), "'w' must lie within the file"),
    "overlap": (
        header(infos=[info(dims=(16,)), info("v", (16,), offset=32)]) + bytes(200),
        "must not overlap, got 'v'",
    ),
    "same_name": (header(infos=[info(), info(offset=32)]) + bytes(200), "names of their own, got 'w' twice"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_a_clear_error(what: str, tmp_path: Path) -> None:
    content, message = DAMAGED[what]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=f"gguf: a.gguf: .*{message}") as refused:
        read(tmp_path / "a.gguf")
    assert len(str(refused.value)) < 400


def test_an_architecture_is_a_short_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(header([key("general.architecture", 8, text("x" * 10**6))]))
    with pytest.raises(ValueError, match="architecture must be a name, got 'xxx") as refused:
        read(tmp_path / "a.gguf").architecture  # noqa: B018
    assert len(str(refused.value)) < 400


def test_long_strings_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    """One letter beyond 16 bits makes each letter of its string four bytes; two such strings are too much."""
    long = text("x" * (2**24 - 4)).replace(b"x" * 4, "🙂".encode(), 1)
    (tmp_path / "a.gguf").write_bytes(header([key("k", 8, long)]))
    assert len(read(tmp_path / "a.gguf").metadata["k"]) == 2**24 - 7
    (tmp_path / "a.gguf").write_bytes(header([key("k", 8, long), key("l", 8, long)]))
    with pytest.raises(ValueError, match="got more at 'l'"):
        read(tmp_path / "a.gguf")


def test_what_lies_beside_is_not_written_to(tmp_path: Path) -> None:
    """A planted link where a temporary file may be expected, and one in the place of the target."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.gguf.partial").symlink_to(victim)
    (tmp_path / "a.gguf").symlink_to(victim)
    write(tmp_path / "a.gguf", METADATA, {"w": torch.ones(2)})
    assert victim.read_text() == "precious"
    assert not (tmp_path / "a.gguf").is_symlink()
    assert read(tmp_path / "a.gguf")["w"].tolist() == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "a.gguf.partial", "victim"]


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "a.gguf")


def test_every_truncation_is_an_error(path: Path) -> None:
    """Cut anywhere, the header is refused or some tensor is."""
    content = path.read_bytes()
    end = max(info.offset + info.nbytes for info in read(path).infos.values())
    for length in [*range(0, 1500), *range(1500, end, 997), end - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"gguf: model.gguf: "):
            read(path)


def test_an_address_that_does_not_suit_is_copied(tmp_path: Path) -> None:
    keys = [key("general.alignment", 4, struct.pack("<I", 1)), key("pad", 0, b"\0")]
    infos = [info("v", (3,), kind=24), info("w", (2,), offset=3)]
    (tmp_path / "a.gguf").write_bytes(header(keys, infos) + b"abc" + struct.pack("<2f", 1.5, -2.0))
    assert read(tmp_path / "a.gguf")["w"].tolist() == [1.5, -2.0]


def test_mistakes_in_writing(tmp_path: Path) -> None:
    named = {"general.architecture": "x"}
    with pytest.raises(ValueError, match=r"must have general.architecture, got None"):
        write(tmp_path / "a.gguf", {}, {})
    with pytest.raises(TypeError, match=r"k must be a str, bool, int, float, list or array, got dict"):
        write(tmp_path / "a.gguf", named | {"k": {}}, {})
    with pytest.raises(TypeError, match=r"w must be a tensor of a type that GGUF has, got torch.complex64"):
        write(tmp_path / "a.gguf", named, {"w": torch.ones(2, dtype=torch.complex64)})
    for metadata, made in ((named | {"k" * 257: 1}, {}), (named, {"ü" * 129: torch.ones(1)})):
        with pytest.raises(ValueError, match="a name must have at most 256 bytes, got '"):
            write(tmp_path / "a.gguf", metadata, made)
    with pytest.raises(ValueError, match=r"k must fit 64 bits, got 18446744073709551616"):
        write(tmp_path / "a.gguf", named | {"k": 2**64}, {})
    assert not list(tmp_path.iterdir())


FUZZ = """
    import random, resource, struct, sys
    from pathlib import Path
    import torch
    from moefuse import QuantTensor
    from moefuse.nn import MoE
    from moefuse.nn.from_gguf import expert_layers
    from moefuse.quant.gguf import read

    path, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    original = path.read_bytes()
    target = path.with_name("mutant.gguf")
    # Beyond what the process has now, 256 MB: a giant allocation becomes a MemoryError, which is not caught.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**28,) * 2)
    rng = random.Random(seed)
    interesting = [0, 1, 2, 3, 4, 8, 9, 12, 13, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
    refused = built = 0
    for _ in range(count):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            # Most of the damage to the header, where it matters.
            at = rng.randrange(min(len(data), 2500)) if rng.random() < 0.9 else rng.randrange(len(data))
            what = rng.randrange(6)
            if what == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif what == 1:
                data[at] = rng.randrange(256)
            elif what == 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(interesting))
            elif what == 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(interesting) & 0xFFFFFFFF)
            elif what == 4:
                del data[at : at + rng.choice([1, 4, 8, 100, len(data)])]
            else:
                data[at:at] = data[rng.randrange(len(data)) :][: rng.choice([1, 4, 8, 100])]
            data = data or bytearray(1)
        target.write_bytes(data)
        try:
            file = read(target)
            for name, info in file.infos.items():
                try:
                    found = file[name]
                except ValueError:  # a format that cannot be read
                    continue
                assert tuple(found.shape) == info.shape
                (found.blocks if isinstance(found, QuantTensor) else found.view(-1).view(torch.uint8)).sum()
            for layer in expert_layers(file):
                try:
                    MoE.from_gguf(file, layer)
                except ValueError:  # a rule or shapes that make no layer
                    continue
                built += 1
        except ValueError as error:
            assert str(error).startswith("gguf: mutant.gguf: "), error
            refused += 1
    print(count, refused, built)
"""


def fuzz(tmp_path: Path, count: int, rng: torch.Generator) -> int:
    small = {"q": random_blocks("Q4_K", (2, 1, 256), rng, 0.1), "f": torch.ones(3), "h": torch.ones(2, 2).half()}
    for layer in range(2):
        small[f"blk.{layer}.ffn_gate_inp.weight"] = torch.randn(2, 32, generator=rng)
        for part in ("gate", "up", "down"):
            small[f"blk.{layer}.ffn_{part}_exps.weight"] = random_blocks("Q8_0", (2, 32, 32), rng, 0.1)
    write(tmp_path / "small.gguf", METADATA, small)
    code = textwrap.dedent(FUZZ)
    seed = rng.initial_seed()
    arguments = [sys.executable, "-c", code, str(tmp_path / "small.gguf"), str(count), str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}, exit {done.returncode}\n{done.stderr[-3000:]}"
    ran, refused, built = map(int, done.stdout.split())
    assert ran == count
    assert built > count // 10
    return refused


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited through /proc")
def test_a_thousand_mutants(tmp_path: Path, rng: torch.Generator) -> None:
    assert fuzz(tmp_path, 1000, rng) > 300


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited through /proc")
def test_twenty_four_thousand_mutants(tmp_path: Path, rng: torch.Generator) -> None:
    assert fuzz(tmp_path, 24_000, rng) > 8_000
