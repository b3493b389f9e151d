"""What is installed is what lies in the tree, under one name, in every way of installing it."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import det_lightning

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SHIPPED = ("det_lightning", "callbacks", "cuda_src")
BUILD_INPUTS = (*SHIPPED, "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip")
OFFLINE = ("--quiet", "--no-deps", "--no-build-isolation")

# Run in a fresh process: which copy of the package every part comes from, and what came in twice.
WHERE = """
import json, sys, det_lightning, det_lightning.callbacks, det_lightning.cuda_src, det_lightning.kernels
from pathlib import Path
homes = [str(Path(module.__file__).resolve().parent) for module in
         (det_lightning, det_lightning.kernels, det_lightning.callbacks, det_lightning.cuda_src)]
kernels = sorted(path.name for path in Path(homes[3]).glob("*.cu*"))
doubles = sorted({"callbacks", "cuda_src", "kernels"} & set(sys.modules))
print(json.dumps({"homes": homes, "kernels": kernels, "doubles": doubles}))
"""


def packages_in_the_tree() -> set[str]:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "det_lightning").rglob("__init__.py")}
    return found | {"det_lightning.callbacks", "det_lightning.cuda_src"}


def kernel_files() -> list[str]:
    return sorted(path.name for path in (ROOT / "cuda_src").glob("*.cu*"))


def copy_of_the_source(folder: Path) -> Path:
    """The files that a build reads, copied so that building leaves nothing in the tree."""
    folder.mkdir()
    for name in BUILD_INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, f"{command}:\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def where(python: Path, cwd: Path, *options: str) -> dict:
    return json.loads(run(python, *options, "-c", WHERE, cwd=cwd))


def test_the_explicit_packages_are_those_of_the_tree():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_in_the_tree()


def test_cuda_src_is_flat_and_holds_only_what_package_data_names():
    shipped = {path.name for pattern in ("*.cu", "*.cuh", "*.py") for path in (ROOT / "cuda_src").glob(pattern)}
    assert shipped == {path.name for path in (ROOT / "cuda_src").iterdir() if path.name != "__pycache__"}


def test_nothing_hooks_into_import_torch():
    assert "entry-points" not in PROJECT["project"]


def test_every_direct_dependency_has_a_tested_version():
    constrained = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    named = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["test"]]
    names = {requirement.split(";")[0].split("[")[0].split(">")[0].strip() for requirement in named}
    assert names - {"nvidia-cuda-nvrtc"} <= constrained


def test_one_copy_of_the_package_is_imported_here():
    home = Path(det_lightning.__file__).resolve().parent
    homes = [
        home,
        home.parent / "callbacks",
        home.parent / "cuda_src",
    ]  # one folder when installed, three in the tree
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "det_lightning"}
    for name, module in loaded.items():
        assert any(Path(module.__file__).resolve().is_relative_to(folder) for folder in homes), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree with the setuptools that torch brings."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("build")
    source = copy_of_the_source(folder / "source")
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", folder, source)
    return next(folder.glob("*.whl"))


def test_a_wheel_contains_callbacks_and_kernels(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(ROOT).as_posix().removeprefix("det_lightning/")
        for folder in SHIPPED
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {f"det_lightning/{name}" for name in modules} <= names
    assert {f"det_lightning/cuda_src/{name}" for name in kernel_files()} <= names
    assert {name.split("/")[0] for name in names} == {
        "det_lightning",
        f"det_lightning-{det_lightning.__version__}.dist-info",
    }


def new_environment(folder: Path, *install: object) -> Path:
    """The python of a new environment that sees the packages of this one, with ours installed into it."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    parents = [path for path in sys.path if path.endswith("site-packages")]
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "parent_environment.pth").write_text("\n".join(parents) + "\n")
    run(*PIP, "--python", python, "install", *OFFLINE, "--force-reinstall", *install)
    return python


def test_a_wheel_imports_from_one_copy_outside_and_inside_the_source_tree(wheel, tmp_path):
    python = new_environment(tmp_path / "environment", wheel)
    outside = where(python, tmp_path)
    assert all("site-packages" in home for home in outside["homes"])
    assert outside["kernels"] == kernel_files()
    inside = where(python, ROOT)  # -c puts the working folder first on the path: the tree hides the whole wheel
    assert all(Path(home).is_relative_to(ROOT) for home in inside["homes"])
    assert outside["doubles"] == inside["doubles"] == []
    assert "bisect" in run(python.parent / "det-lightning", "--help", cwd=tmp_path)


def test_an_editable_install_imports_the_tree_from_anywhere(tmp_path):
    source = copy_of_the_source(tmp_path / "source")
    python = new_environment(tmp_path / "environment", "--editable", source)
    for folder in (tmp_path, source):
        seen = where(python, folder)
        assert all(Path(home).is_relative_to(source) for home in seen["homes"])
        assert seen["kernels"] == kernel_files()
        assert seen["doubles"] == []
