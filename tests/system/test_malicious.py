"""Files and names that mean harm are refused with a clear error, and do nothing."""

import os

import pytest
import torch

from fedlib import run
from fedlib.core.storage import DamagedFile, read_json, read_lines, read_tensors, write_json, write_lines
from fedlib.runs.store import run_path
from tests.helpers.stored import ONE, short, small


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


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("rounds: 3\nlr: 0.1\nrounds: 4", "key 'rounds' is given twice"),
        ("options: {zeta: 1, zeta: 2}", "key 'zeta' is given twice"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]", "aliases are not used"),
        ("[" * 5000, "recursion"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: \0", "special characters are not allowed"),
        ("# " + "x" * 2**20, "bytes exceed"),
        ("- 1", "expected a mapping"),
    ],
    ids=lambda x: x[:20] if " " in x else "",
)  # fmt: skip
def test_yaml_that_is_more_than_a_mapping_of_values_is_refused(text, message, tmp_path):
    from fedlib.runs.params_files import load_yaml

    file = tmp_path / "evil.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_yaml(file)
    assert "evil.yaml" in str(error.value)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/cron.d/x", "..", "a\0b", "C:\\x", "数据" * 60, "\ud800", "-rf", "x" * 999]
)
@pytest.mark.parametrize("at_hand", [False, True])
def test_no_name_leads_out_of_the_runs_folder(name, at_hand, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLIB_DATA", raising=False)
    if at_hand:
        monkeypatch.setenv("FEDLIB_DATA", str(tmp_path / "data"))
    for e in (short("reefl", dataset=name), short("reefl").replace(method=name)):
        path = run_path(e, tmp_path)
        assert path.resolve().parent == tmp_path.resolve() and len(path.name.encode()) < 200
        path.mkdir()
        with pytest.raises(ValueError, match="experiment: (dataset|method) .* is (unknown|no parquet)"):
            run(e, ONE, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_tables_papers_and_profiles_come_from_the_params_folder_only():
    from fedlib.runs.params import load_grid

    for arguments in (
        ("reefl", "../../outside", "smoke"),
        ("../reefl", "table1", "smoke"),
        ("reefl", "table1", "../x"),
    ):
        with pytest.raises(ValueError, match="(table|paper|profile) = '.*' is unknown"):
            load_grid(*arguments)


@pytest.mark.parametrize("link", ["run", "clients"])
def test_links_do_not_lead_deletions_elsewhere(link, tmp_path):
    e = small("depthfl", rounds=1)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "1-1.safetensors").write_bytes(b"weights")
    path = run_path(e, tmp_path / "runs")
    if link == "run":
        path.parent.mkdir()
        path.symlink_to(precious)
    else:
        path.mkdir(parents=True)
        (path / "clients").symlink_to(precious)
    with pytest.raises(ValueError, match="is a symbolic link"):
        run(e, ONE, tmp_path / "runs", progress=False)
    assert (precious / "1-1.safetensors").exists()


def test_a_stored_file_over_a_link_replaces_the_link(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "summary.json").symlink_to(tmp_path / "target")
    write_json(tmp_path / "summary.json", {"a": 1})
    write_lines(tmp_path / "lines", [{"a": 1}, {"a": float("nan")}])
    assert (tmp_path / "target").read_text() == "precious" and read_json(tmp_path / "summary.json") == {"a": 1}
    assert len(read_lines(tmp_path / "lines")) == 2
