"""Files and names that mean harm are refused with a clear error, and do nothing."""

import pytest

from fedlib import run
from fedlib_lab.runs.store import run_path
from tests.helpers.stored import ONE, short, small


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
    from fedlib_lab.runs.params_files import load_yaml

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
    from fedlib_lab.runs.params import load_grid

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
