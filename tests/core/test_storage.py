"""Files of tensors and of numbers: what is damaged or means harm is refused, named, and does nothing."""

import os

import pytest
import torch

from fedlib.core.storage import DamagedFile, read_json, read_lines, read_tensors, write_json, write_lines, write_tensors


def test_a_pickle_renamed_is_refused_not_executed(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DamagedFile, match="checkpoint.safetensors is damaged"):
        read_tensors(file)
    torch.save({"a": torch.ones(2)}, file)
    with pytest.raises(DamagedFile, match="checkpoint.safetensors is damaged"):
        read_tensors(file)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "header",
    [b'{"a":' * 10_000, b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}', b"[]", b"\xff"],
)
@pytest.mark.parametrize("claimed", [None, 2**63, 2**32])
def test_bombs_in_a_safetensors_header_are_refused(header, claimed, tmp_path):
    file = tmp_path / "bomb.safetensors"
    file.write_bytes((claimed or len(header)).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(DamagedFile, match="bomb.safetensors is damaged"):
        read_tensors(file)


@pytest.mark.parametrize("read, name", [(read_json, "summary.json"), (read_lines, "metrics.jsonl")])
def test_json_of_the_wrong_size_depth_or_kind_is_refused(read, name, tmp_path):
    file = tmp_path / name
    with open(file, "wb") as f:
        f.truncate(10 * 2**30)  # ten sparse gigabytes: refused by their size, never read
    with pytest.raises(DamagedFile, match=f"{name} is damaged .its 10737418240 bytes exceed"):
        read(file)
    for text in (
        "[" * 100_000,
        '{"a":' * 50_000,
        "NaN\n",
        "[1]\n",
        '"x"\n',
        "{}\n",
        '{"t": ' + "9" * 5000 + "}\n",
        "\0",
    ):
        file.write_text(text)
        with pytest.raises(DamagedFile, match=f"{name} is damaged"):
            read(file)
    file.unlink()
    os.mkfifo(file)  # opening it would wait for ever
    with pytest.raises(DamagedFile, match="not a regular file"):
        read(file)


def test_a_stored_file_over_a_link_replaces_the_link(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "summary.json").symlink_to(tmp_path / "target")
    write_json(tmp_path / "summary.json", {"a": 1})
    write_lines(tmp_path / "lines", [{"a": 1}, {"a": float("nan")}])
    assert (tmp_path / "target").read_text() == "precious" and read_json(tmp_path / "summary.json") == {"a": 1}
    assert len(read_lines(tmp_path / "lines")) == 2


def flip(file, bit=None):
    bit = 8 * (file.stat().st_size - 5) if bit is None else bit  # in the last tensor
    with open(file, "r+b") as f:
        f.seek(bit // 8)
        (byte,) = f.read(1)
        f.seek(bit // 8)
        f.write(bytes([byte ^ 1 << bit % 8]))


def test_no_flipped_bit_or_cut_changes_a_tensor(tmp_path):
    file = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(24.0).view(2, 3, 4), "b": torch.tensor(3), "c": torch.zeros(0), "d": torch.ones(3, dtype=torch.bfloat16)}  # fmt: skip
    write_tensors(file, tensors, {"t": 1, "note": ["é", None]})
    data, refused = file.read_bytes(), 0
    assert read_tensors(file)[1] == {"t": 1, "note": ["é", None]}
    for bit in range(0, 8 * len(data), 3):
        flip(file, bit)
        try:
            found, metadata = read_tensors(file)
            assert metadata == {"t": 1, "note": ["é", None]} and found.keys() == tensors.keys()
            assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in tensors.items())
        except DamagedFile as error:
            refused += "x.safetensors is damaged" in str(error)
        flip(file, bit)
    for length in range(0, len(data), 7):
        file.write_bytes(data[:length])
        with pytest.raises(DamagedFile):
            read_tensors(file)
    assert refused > 0.9 * 8 * len(data) / 3
