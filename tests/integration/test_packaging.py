"""What is built: the package with its templates and clusters, and metadata for a package index.

The virtual environments hold the package alone; a path file lends them this environment's
dependencies, so that nothing is downloaded. The lent directory's own path files are not read, so an
editable installation in it cannot stand in for the one under test.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from hpc_toolkit import __version__
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import ScriptSpec

CHECKOUT = Path(__file__).parents[2]
SITE_PACKAGES = sysconfig.get_path("purelib")
LINKS = {
    "slurm/data/templates": "templates",
    "slurm/data/clusters": "clusters",
    "rundir/data/examples": "examples/new",
}
"""Links of the package, and the folders of the repository to which they lead."""
SHIPPED = sorted(
    f"hpc_toolkit/{link}/{path.relative_to(CHECKOUT / folder)}"
    for link, folder in LINKS.items()
    for path in (CHECKOUT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)
RENDER = """
import sys; sys.path[:0] = sys.argv[1:]
import hpc_toolkit
from hpc_toolkit.slurm.clusters.facts import cluster_names, load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import ScriptSpec
print(hpc_toolkit.__file__)
print(cluster_names())
from pathlib import Path
from hpc_toolkit.cli.mapping import EXAMPLES, write_example
for example in EXAMPLES:
    write_example(Path("new", example), example)
spec = ScriptSpec(nodes=8, gpus_per_node=4, python="/opt/python")
sys.stdout.write(render_script(spec, load_cluster("lab")))
"""


def run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(argument) for argument in argv],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this checkout, and the wheel that was built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, CHECKOUT, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def make_environment(folder: Path, *install: str | Path) -> Path:
    """A virtual environment with the package installed as told; returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    purelib = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    Path(purelib, "lent.pth").write_text(f"{SITE_PACKAGES}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps")
    run(*pip, "--no-build-isolation", *install, cwd=folder)
    return python


def assert_renders(python: str | Path, *path: str | Path, at: Path, package: Path) -> None:
    first, names, script = run(python, "-I", "-c", RENDER, *path, cwd=at).split("\n", 2)

    assert Path(first).is_relative_to(package)
    assert names == "['generic', 'killarney', 'lab']"
    spec = ScriptSpec(nodes=8, gpus_per_node=4, python="/opt/python")
    assert script == render_script(spec, load_cluster("lab"))
    for source in (CHECKOUT / "examples/new").glob("*/*.*"):
        assert (at / "new" / source.parent.name / source.name).read_bytes() == source.read_bytes()


def test_wheel_holds_the_package_and_its_data_once(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()

    assert len(names) == len(set(names))
    about, data = f"hpctk-{__version__}.dist-info", f"hpctk-{__version__}.data"
    assert {name.split("/")[0] for name in names} == {"hpc_toolkit", "hydra_plugins", about, data}
    assert [name for name in names if name.startswith(data)] == [
        f"{data}/data/share/man/man1/hpctk.1"
    ]
    found = [name for name in names if re.match(r"hpc_toolkit/\w+/data/", name)]
    assert sorted(found) == SHIPPED
    # Other distributions have plugins in the same package, so it has no __init__.py.
    assert [name for name in names if "plugins" in name] == ["hydra_plugins/hpctk_launcher.py"]
    assert {"hpc_toolkit/py.typed", f"{about}/licenses/LICENSE"} <= set(names)


def test_sdist_holds_the_package_with_its_data_as_files(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()

    files = {member.name.split("/", 1)[1] for member in members if member.isreg()}
    assert files.issuperset(SHIPPED)
    beside = {name for name in files if not name.startswith("hpc_toolkit/")}
    texts = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
    assert beside == {
        *texts,
        "pyproject.toml",
        "hatch_build.py",
        "PKG-INFO",
        ".gitignore",
        "docs/hpctk.1",
        "hydra_plugins/hpctk_launcher.py",
    }


def test_metadata_suits_a_package_index(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        about = f"hpctk-{__version__}.dist-info/METADATA"
        metadata = message_from_string(archive.read(about).decode("utf-8"))

    text = metadata.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    (repository,) = (url[12:] for url in metadata.get_all("Project-URL", []) if "Reposi" in url)
    assert not {"dev", "oracles"} & set(metadata.get_all("Provides-Extra", []))
    assert (metadata["Version"], metadata["License-Expression"]) == (__version__, "MIT")
    assert f"{repository}/blob/v{__version__}/docs/architecture.md" in targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_installed_wheel_renders_outside_the_checkout(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "venv", built[1])

    assert_renders(python, at=tmp_path, package=tmp_path / "venv")
    assert (tmp_path / "venv/share/man/man1/hpctk.1").is_file()
    assert run(python.with_name("hpctk"), "--version", cwd=tmp_path).startswith("hpctk ")
    assert run(python, "-m", "hpc_toolkit", "--version", cwd=tmp_path).startswith("hpctk ")


def test_editable_installation_reads_the_files_that_are_edited(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv", "--editable", CHECKOUT)

    assert_renders(python, at=tmp_path, package=CHECKOUT / "hpc_toolkit")
    plugin = "import importlib.util as u; print(u.find_spec('hydra_plugins.hpctk_launcher').origin)"
    assert run(python, "-c", plugin, cwd=tmp_path).startswith(str(CHECKOUT))
    for link, folder in LINKS.items():
        assert (CHECKOUT / "hpc_toolkit" / link).resolve() == CHECKOUT / folder
