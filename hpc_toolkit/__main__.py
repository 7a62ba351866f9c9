"""``python -m hpc_toolkit`` is ``hpctk``."""

from hpc_toolkit.system.imports import listed_imports

with listed_imports():
    from hpc_toolkit.cli import main

if __name__ == "__main__":
    main()
